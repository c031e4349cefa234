"use strict";
// Asks the job for its data, again and again, and has them shown.

const API = "/api/v1";
const AGAIN_MS = 2000;
const OVER = new Set(["done", "stopped", "failed"]);

async function get(path) {
  const answer = await fetch(API + path);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// null: all is well.
function trouble(text) {
  byId("link").hidden = text === null;
  say(byId("link"), text ?? "");
}

function gone(why) {
  const status = view.status();
  if (!status) return trouble(`The coordinator does not answer${why}. This page tries again.`);
  trouble(OVER.has(status.state)
    ? `The job is over. This page shows how it ended, as of ${clockTime(heard_s)}.`
    : `The coordinator does not answer${why}. This page shows the job as of ${clockTime(heard_s)}, and tries again.`);
}

let heard_s = 0;

// The key of a link opens the page once. It does not stay in the address, which people copy.
function keyOfLink() {
  const [, key] = location.hash.match(/^#key=([\w-]+)$/) ?? [];
  if (key) history.replaceState(null, "", location.pathname);
  return key;
}

async function begin() {
  const key = keyOfLink();
  let session = await get("/session");
  if (key && !session.reads) {
    await controls.logInWith(key);
    session = await get("/session");
  }
  byId("login").hidden = session.reads;
  controls.show(session);
  if (!session.reads) {
    trouble(null);
    say(byId("sentence"), "Open the link that “paramserver dashboard” prints, as the user who started the job. "
      + "Or log in with a token of the job: join.token to read, the admin token to give commands as well.");
    return;
  }
  charts.load(await get("/series"));
  view.settings(await get("/settings"));
  follow();
}

function follow() {
  const source = new EventSource(`${API}/stream`);
  source.onmessage = (message) => {
    const update = JSON.parse(message.data);
    const known = view.status();
    if (known && known.job !== update.status.job) return location.reload(); // another job at the same address
    if (known && OVER.has(known.state) && !update.status.term) return; // the coordinator has given the job up: it is over
    heard_s = update.at_s;
    trouble(null);
    view.show(update.status, update.at_s);
    charts.add(update.at_s, update.status);
    view.hear(update.events);
    view.draw();
    controls.follow(update.status);
    const workers = update.status.processes.filter((p) => p.role === "worker");
    if (OVER.has(update.status.state) || (workers.length && workers.every((p) => p.gone))) loadLedger();
    if (!update.status.said.length) return;
    source.close(); // nothing changes any more
    byId("controls").hidden = true;
    trouble("The run is over. This page asks nobody any more, and stays as it is until you close it.");
  };
  source.onerror = () => {
    gone("");
    if (source.readyState !== EventSource.CLOSED) return;
    setTimeout(start, AGAIN_MS);
  };
}

async function loadLedger() {
  try {
    view.ledger(await get("/ledger"));
  } catch {
    // The table keeps its last numbers.
  }
}

byId("ledger-box").addEventListener("toggle", () => {
  if (byId("ledger-box").open) loadLedger();
});

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  say(byId("login-said"), await controls.logIn(byId("token")));
  if (!byId("login-said").textContent) await start();
});

async function start() {
  try {
    await begin();
  } catch (error) {
    gone(error instanceof TypeError ? "" : ` (${error.message})`);
    setTimeout(start, AGAIN_MS);
  }
}

// Another link was opened in the same tab.
window.addEventListener("hashchange", () => location.reload());

start();
