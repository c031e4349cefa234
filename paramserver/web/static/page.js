// The page of a job. Names and texts of the job are only ever set as textContent.

const API = "/api/v1";
const WELL = new Set(["training", "done"]);
const BAD = new Set(["failed", "stuck", "degraded", "lost", "no backup"]);
const MARK = { well: "●", wait: "◐", bad: "▲" };
const MOMENTS = 600;

const byId = (id) => document.getElementById(id);

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function number(value) {
  if (typeof value !== "number") return String(value ?? "");
  return Number.isInteger(value) ? value.toLocaleString() : value.toPrecision(4);
}

function bytes(value) {
  const units = ["B/s", "kB/s", "MB/s", "GB/s"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value.toFixed(at ? 1 : 0)} ${units[at]}`;
}

const kindOf = (state) => (WELL.has(state) || state === "replicated" ? "well" : BAD.has(state) ? "bad" : "wait");

// columns: [title, function of a row -> text, "number" | "state" | ""]
function fill(table, columns, rows, classOf = () => "") {
  const head = element("tr");
  for (const [title, , kind] of columns) {
    const cell = element("th", title, kind === "number" ? "number" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const lines = rows.map((row) => {
    const line = element("tr", "", classOf(row));
    for (const [, show, kind] of columns) {
      const text = show(row);
      if (kind === "state") line.append(element("td", `${MARK[kindOf(text)]} ${text}`, kindOf(text)));
      else line.append(element("td", text, kind));
    }
    return line;
  });
  const thead = element("thead");
  const tbody = element("tbody");
  thead.append(head);
  tbody.append(...lines);
  table.replaceChildren(thead, tbody);
}

function list(box, sentences) {
  box.hidden = sentences.length === 0;
  box.replaceChildren(...sentences.map((sentence) => element("li", sentence)));
}

function metricsOf(process) {
  return Object.entries(process.metrics).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}

const PROCESSES = [
  ["name", (p) => p.name, ""],
  ["state", (p) => p.state, "state"],
  ["version", (p) => (p.role === "coordinator" ? "" : number(p.version)), "number"],
  ["epoch", (p) => (p.role === "worker" ? number(p.epoch + 1) : ""), "number"],
  ["clock", (p) => (p.role === "worker" ? number(p.clock) : ""), "number"],
  ["speed", (p) => (p.role === "worker" ? `${number(Math.round(p.samples_per_s))} samples/s`
    : p.role === "server" ? bytes(p.bytes_per_s) : ""), "number"],
  ["values", metricsOf, ""],
  ["address", (p) => p.address, ""],
  ["why", (p) => p.reason, ""],
];
const SHARDS = [
  ["shard", (s) => String(s.shard), "number"],
  ["state", (s) => s.state, "state"],
  ["primary", (s) => s.primary, ""],
  ["backups", (s) => s.backups.map((b) => (b.whole ? b.server : `${b.server} ${Math.floor(100 * b.share)} %`)).join(", "), ""],
];
const clockTime = (seconds) => new Date(1000 * seconds).toLocaleTimeString();
const EVENTS = [
  ["time", (e) => clockTime(e.at_s), ""],
  ["version", (e) => number(e.version), "number"],
  ["what", (e) => e.text, ""],
];
const SETTINGS = [["setting", (s) => s.key, ""], ["value", (s) => s.value, ""], ["from", (s) => s.origin, ""]];

// ---- curves

const moments = [];
let names = ["samples_per_s", "version"];

function curve(name) {
  const points = moments.map((m) => [m.at_s, m[name]]).filter(([, value]) => Number.isFinite(value));
  if (points.length < 2) return null;
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [from, until] = [points[0][0], points.at(-1)[0]];
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 300 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "curve");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(space, "polyline");
  line.setAttribute("points", points.map(([at, value]) =>
    `${(300 * (at - from) / (until - from || 1)).toFixed(1)},${(95 - 90 * (value - low) / (high - low || 1)).toFixed(1)}`).join(" "));
  svg.append(line);
  return { svg, points, low, high };
}

function draw() {
  const charts = byId("charts");
  for (const name of names) {
    let figure = [...charts.children].find((one) => one.dataset.name === name);
    const made = curve(name);
    if (!made) continue;
    if (!figure) {
      figure = element("figure");
      figure.dataset.name = name;
      const table = element("table");
      const details = element("details");
      details.append(element("summary", "as a table"), table);
      details.addEventListener("toggle", draw);
      figure.append(element("figcaption"), element("div"), details);
      charts.append(figure);
    }
    const [caption, place, details] = figure.children;
    const title = name === "samples_per_s" ? "samples per second" : name;
    caption.textContent = `${title}: ${number(made.points.at(-1)[1])} now, from ${number(made.low)} to ${number(made.high)}`;
    place.replaceChildren(made.svg);
    if (details.open) {
      const rows = made.points.slice(-60).reverse();
      fill(details.querySelector("table"),
        [["time", ([at]) => clockTime(at), ""], [title, ([, value]) => number(value), "number"]], rows);
    }
  }
}

function remember(at_s, status) {
  moments.push({ at_s, version: status.version, samples_per_s: status.samples_per_s, ...status.metrics });
  names = [...new Set([...Object.keys(status.metrics), ...names])].slice(0, 34);
  if (moments.length >= MOMENTS) moments.splice(0, moments.length, ...moments.filter((_, index) => index % 2 === 0));
}

// ---- what is known

const events = [];

function show(status) {
  byId("sentence").textContent = status.sentence;
  document.title = `${status.job}: ${status.state}`;
  const parts = [`version ${number(status.version)}`, `${number(Math.round(status.samples_per_s))} samples/s`];
  if (status.epochs) parts.push(`epoch ${status.epoch + 1} of ${status.epochs}`);
  if (status.slices_planned) parts.push(`${Math.floor(100 * status.slices_done / status.slices_planned)} % of the slices`);
  if (status.checkpoint) parts.push(`checkpoint ${status.checkpoint}`);
  if (status.losses) parts.push(`${status.losses} lost so far`);
  byId("facts").textContent = parts.join(" · ");
  list(byId("blame"), status.blame);
  list(byId("wrong"), [...Object.values(status.troubles), ...Object.values(status.broken_promises)]);
  fill(byId("processes"), PROCESSES, status.processes, (p) => (p.gone ? "gone" : ""));
  byId("shards-section").hidden = !status.shards;
  if (status.shards) fill(byId("shards"), SHARDS, status.shards);
}

function hear(update) {
  show(update.status);
  remember(update.at_s, update.status);
  draw();
  if (update.events.length) {
    const known = new Set(events.map((e) => `${e.at_s} ${e.text}`));
    events.push(...update.events.filter((e) => !known.has(`${e.at_s} ${e.text}`)));
    events.splice(0, Math.max(0, events.length - 100));
    fill(byId("events"), EVENTS, [...events].reverse());
  }
}

async function get(path) {
  const answer = await fetch(API + path);
  if (!answer.ok) throw new Error((await answer.json()).error);
  return answer.json();
}

async function begin() {
  const session = await get("/session");
  byId("login").hidden = session.reads;
  if (!session.reads) {
    byId("sentence").textContent = "Log in with the token of the job (join.token) to see it.";
    return;
  }
  const series = await get("/series");
  series.at_s.forEach((at_s, index) => {
    const moment = { at_s, version: series.version[index], samples_per_s: series.samples_per_s[index] };
    for (const [name, column] of Object.entries(series.values)) moment[name] = column[index];
    moments.push(moment);
  });
  names = [...new Set([...Object.keys(series.values), ...names])];
  fill(byId("settings"), SETTINGS, (await get("/settings")).settings);
  follow();
}

function follow() {
  const source = new EventSource(`${API}/stream`);
  source.onmessage = (message) => {
    byId("link").hidden = true;
    hear(JSON.parse(message.data));
  };
  source.onerror = () => {
    byId("link").hidden = false;
    byId("link").textContent = "The coordinator does not answer. This page shows what was known last, and tries again.";
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 2000);
  };
}

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await fetch(`${API}/login`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ token: byId("token").value }),
  });
  byId("token").value = "";
  byId("login-said").textContent = answer.ok ? "" : (await answer.json()).error;
  if (answer.ok) await start();
});

async function start() {
  try {
    await begin();
  } catch (error) {
    byId("link").hidden = false;
    byId("link").textContent = `The coordinator does not answer (${error.message}). This page tries again.`;
    setTimeout(start, 2000);
  }
}

start();
