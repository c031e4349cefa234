"use strict";
// Commands of operators. Each is a POST of JSON with the session of an admin token; nothing is sent without a click.

const controls = (() => {
  let commands = false;
  let status = null;

  async function post(path, body) {
    const answer = await fetch(`/api/v1${path}`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    return { ok: answer.ok, said: await answer.json() };
  }

  // The reason why the login failed; empty if it did not.
  async function logIn(field) {
    const token = field.value;
    field.value = "";
    return logInWith(token);
  }

  async function logInWith(token) {
    const { ok, said } = await post("/login", { token });
    return ok ? "" : said.error;
  }

  // ---- the forms, made once

  function labelled(text, field) {
    const label = element("label", text);
    field.id = `control-${text.replace(/\W+/g, "-")}`;
    label.htmlFor = field.id;
    return [label, field];
  }

  function field(type, value) {
    const made = element("input");
    made.type = type;
    made.value = value;
    if (type === "number") made.min = 0;
    return made;
  }

  function choice(values) {
    const made = element("select");
    made.append(...values.map((value) => element("option", value)));
    return made;
  }

  // A form with fields and one button. `wish` gives [path, body, question or ""].
  function form(name, title, fields, wish) {
    const made = element("form");
    made.id = `form-${name}`;
    made.append(...fields, element("button", title));
    made.addEventListener("submit", async (event) => {
      event.preventDefault();
      const [path, body, question] = wish();
      if (question && !(await agreed(question))) return;
      say(byId("said"), `${title} …`);
      try {
        const { ok, said } = await post(path, body);
        say(byId("said"), ok ? said.message : `Refused: ${said.error}`);
        if (!ok) await ask();
      } catch {
        say(byId("said"), "The coordinator does not answer. Nobody knows whether the command was carried out.");
      }
    });
    return made;
  }

  // Resolves to whether the reader says yes.
  function agreed(question) {
    say(byId("question"), question);
    const dialog = byId("agree");
    dialog.returnValue = "";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    });
  }

  function dialog() {
    const made = element("dialog");
    made.id = "agree";
    made.setAttribute("aria-labelledby", "question");
    const box = element("form");
    box.method = "dialog";
    const question = element("p");
    question.id = "question";
    const no = element("button", "No");
    const yes = element("button", "Yes");
    no.value = "no";
    no.autofocus = true;
    yes.value = "yes";
    box.append(question, no, yes);
    made.append(box);
    return made;
  }

  function build() {
    const mode = choice(["sync", "async"]);
    const staleness = field("number", 3);
    const unbounded = field("checkbox", "");
    mode.addEventListener("change", () => { staleness.disabled = unbounded.disabled = mode.value === "sync"; });
    const workers = field("number", status?.expected_workers ?? 1);
    workers.min = 1;
    const who = choice(["workers", "servers"]);
    const member = choice([]);
    member.className = "members";
    const server = choice([]);
    server.className = "servers";
    const said = element("p");
    said.id = "said";
    said.setAttribute("role", "status");
    const box = element("div", "", "forms");
    box.append(
      form("consistency", "Change the mode", [...labelled("mode", mode), ...labelled("staleness", staleness),
        ...labelled("without a bound", unbounded)], () => ["/consistency",
        mode.value === "sync" ? { mode: "sync" }
          : { mode: "async", staleness: unbounded.checked ? "unbounded" : Number(staleness.value) }, ""]),
      form("scale", "Scale", [...labelled("number of", who), ...labelled("to", workers)],
        () => ["/scale", { [who.value]: Number(workers.value) }, who.value === "servers" ? "Move the model to another number of servers? Workers wait meanwhile." : ""]),
      form("drain", "Drain", labelled("worker or server", member), () => ["/drain", { name: member.value },
        `Ask ${member.value} to leave the job?`]),
      form("restart", "Restart", labelled("server", server), () => ["/restart", { name: server.value },
        `Restart ${server.value}?`]),
      form("checkpoint", "Checkpoint now", [], () => ["/checkpoint", {}, ""]),
      form("stop", "Stop the job", [], () => ["/stop", { reason: "stopped on the dashboard" },
        "Stop the job for everybody? Its weights so far are gathered."]),
    );
    mode.value = status?.mode ?? "sync";
    staleness.disabled = unbounded.disabled = mode.value === "sync";
    if (typeof status?.staleness === "number") staleness.value = status.staleness;
    const out = element("button", "Log out");
    out.type = "button";
    out.addEventListener("click", async () => {
      await post("/logout", {});
      location.reload();
    });
    return [box, said, dialog(), out];
  }

  function login() {
    const token = field("password", "");
    token.autocomplete = "off";
    token.required = true;
    const said = element("span");
    said.setAttribute("role", "alert");
    const made = element("form");
    made.id = "admin-login";
    made.append(...labelled("admin token", token), element("button", "Log in"), said);
    made.addEventListener("submit", async (event) => {
      event.preventDefault();
      say(said, await logIn(token));
      if (!said.textContent) await ask();
      if (!said.textContent && !commands) say(said, "this token may read, but gives no commands");
    });
    return [element("p", "Commands take the admin token of the job: `paramserver dashboard --token` prints it."), made];
  }

  // ---- for page.js

  async function ask() {
    show(await (await fetch("/api/v1/session")).json());
  }

  function show(session) {
    const box = byId("controls");
    if (box.dataset.commands === String(session.commands)) return;
    box.dataset.commands = String(session.commands);
    commands = session.commands;
    box.replaceChildren(box.querySelector("summary"), ...(commands ? build() : login()));
    if (status) follow(status);
  }

  function offer(select, names) {
    if (!select || select.dataset.is === names.join()) return;
    const chosen = select.value;
    select.dataset.is = names.join();
    select.replaceChildren(...names.map((name) => element("option", name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  function follow(now) {
    const first = status === null;
    status = now;
    if (first && commands) {
      delete byId("controls").dataset.commands;
      return show({ commands });
    }
    const there = (role) => status.processes.filter((p) => p.role === role && !p.gone).map((p) => p.name);
    offer(document.querySelector("select.members"), [...there("worker"), ...there("server")]);
    offer(document.querySelector("select.servers"), there("server"));
  }

  return { show, follow, logIn, logInWith };
})();
