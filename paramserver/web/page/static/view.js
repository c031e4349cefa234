"use strict";
// Shows what the API has answered: status, events, ledger, settings. Makes no requests.

// What a worker does, in the order of a step; the colours are in page.css.
const PHASES = { data: "data", compute: "compute", send: "send", wait: "wait", receive: "receive", other: "update, other" };
const RECENT_S = 30;

const view = (() => {
  let status = null;
  const events = [];
  const spent = new Map(); // by name of a worker: [[at_s, phases], …] of the last seconds

  // ---- the head

  function head() {
    say(byId("sentence"), status.sentence);
    document.title = `${status.job}: ${status.state}`;
    const chip = byId("state");
    chip.hidden = false;
    chip.className = `chip ${kindOf(status.state)}`;
    say(chip, marked(status.state));
    const parts = [`version ${number(status.version)}`];
    if (!status.said.length) {
      const traffic = status.processes.reduce((sum, p) => sum + (p.gone ? 0 : p.bytes_per_s), 0);
      parts.push(`${number(Math.round(status.samples_per_s))} samples/s`, `${bytes(traffic)}/s on the wire`);
    }
    if (status.epochs) parts.push(`epoch ${Math.min(status.epoch + 1, status.epochs)} of ${status.epochs}`);
    if (status.slices_planned) parts.push(`${Math.floor(100 * status.slices_done / status.slices_planned)} % done`);
    if (status.checkpoint) parts.push(`checkpoint ${status.checkpoint}`);
    if (status.losses) parts.push(`${status.losses} lost so far`);
    if (status.takeovers) parts.push(`takeovers ${status.takeovers}`);
    if (status.rollbacks) parts.push(`returns to a checkpoint ${status.rollbacks}`);
    say(byId("facts"), parts.join(" · "));
    byId("progress").hidden = !status.slices_planned;
    if (status.slices_planned) byId("progress").value = status.slices_done / status.slices_planned;
    blame();
    const wrong = [...Object.values(status.troubles), ...Object.values(status.broken_promises)];
    list(byId("wrong"), status.said.length ? [] : wrong);
    byId("end").hidden = !status.said.length;
    byId("end").className = status.said.length ? kindOf(status.state) : "";
    list(byId("last-lines"), status.said);
  }

  const sentences = () => (status.said.length ? [] : [status.blame ?? []].flat().filter(Boolean));

  function blame() {
    const box = byId("blame");
    const said = sentences();
    const live = status.state === "training" || status.state === "degraded";
    const shown = said.length ? said : [live && status.waits?.steps ? "No worker and no server holds the others up noticeably." : ""];
    box.className = said.length ? "found" : "";
    box.hidden = shown[0] === "";
    if (box.dataset.is === shown.join("\n")) return;
    box.dataset.is = shown.join("\n");
    box.replaceChildren(...shown.map((sentence) => element("p", sentence)));
  }

  // ---- workers

  // Seconds by phase in the last half minute; since the beginning if there is no more than one moment.
  function recent(process) {
    const kept = spent.get(process.name);
    if (!kept) return process.phases;
    const [, first] = kept[0];
    const gone = Object.keys(PHASES).map((name) => [name, Math.max(0, (process.phases[name] ?? 0) - (first[name] ?? 0))]);
    return gone.some(([, seconds]) => seconds > 0) ? Object.fromEntries(gone) : process.phases;
  }

  function remember(at_s) {
    for (const process of status.processes) {
      if (!process.phases) continue;
      const kept = spent.get(process.name) ?? [];
      const last = kept.at(-1)?.[1];
      if (last && Object.keys(PHASES).some((name) => process.phases[name] < last[name])) kept.length = 0;
      kept.push([at_s, process.phases]);
      while (kept.length > 2 && at_s - kept[1][0] > RECENT_S) kept.shift();
      spent.set(process.name, kept);
    }
  }

  // A bar of the shares of all phases, with the same as text.
  function bar(process) {
    if (!process.phases) return "";
    const phases = recent(process);
    const all = Object.keys(PHASES).reduce((sum, name) => sum + (phases[name] ?? 0), 0) || 1;
    const parts = Object.entries(PHASES).map(([name, word]) => [name, word, (phases[name] ?? 0) / all]);
    const text = parts.filter(([, , part]) => part >= 0.01).map(([, word, part]) => `${word} ${share(part)}`).join(", ");
    const box = element("div", "", "bar");
    box.dataset.is = text || "nothing yet";
    box.title = text;
    box.append(onlyRead(text));
    for (const [name, , part] of parts) {
      if (part < 0.005) continue;
      const piece = element("span", part >= 0.14 ? share(part) : "", `phase-${name}`);
      piece.setAttribute("aria-hidden", "true");
      piece.style.flexGrow = part;
      box.append(piece);
    }
    return box;
  }

  // The speed as a bar against the fastest worker.
  function speed(process, fastest) {
    const box = element("div", "", "speed");
    const text = process.gone ? "" : number(Math.round(process.samples_per_s));
    box.dataset.is = `${text} ${fastest}`;
    const part = element("span", "", "measure");
    part.style.width = `${fastest ? Math.min(100, 100 * process.samples_per_s / fastest) : 0}%`;
    box.append(element("span", text), part);
    return box;
  }

  const named = (name) => sentences().some((said) => said.split(/[^\w-]+/).includes(name));

  // The name, with its state unless the worker trains, and its values of ctx.log for the pointer.
  function called(process) {
    const { state } = process;
    const box = element("span", "", kindOf(state));
    const values = Object.entries(process.metrics).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    box.dataset.is = [process.name, state, values].join();
    box.title = [`${process.name} on ${hostOf(process)}: ${state}`, values].filter(Boolean).join("; ");
    box.append(`${SYMBOLS[kindOf(state)]} ${process.name}`);
    box.append(state === "training" ? onlyRead(`: ${state}`) : ` ${state}`);
    return box;
  }

  function doing(process) {
    if (process.gone || process.state !== "training") return process.reason;
    if (process.phase === "wait") return `waits for ${process.waiting_for || "the others"}`;
    if (process.phase) return PHASES[process.phase] ?? process.phase;
    return process.waiting_for ? `waits for ${process.waiting_for}` : process.reason;
  }

  function now(process) {
    const since = process.phase_s >= 1 && !process.gone ? `${duration(process.phase_s)} ` : "";
    return hinted(since + doing(process));
  }

  // A text that may be cut off; the pointer shows all of it.
  function hinted(text) {
    const box = element("span", text);
    box.dataset.is = box.title = text;
    return box;
  }

  function workers() {
    const rows = status.processes.filter((p) => p.role === "worker");
    const there = rows.filter((p) => !p.gone);
    const fastest = Math.max(0, ...there.map((p) => p.samples_per_s));
    const ahead = Math.max(0, ...there.map((p) => p.clock));
    const timed = rows.some((p) => p.phases);
    const columns = [["worker", called, "name"]];
    if (timed) columns.push([`where its last ${RECENT_S} s went`, bar, "bars"]);
    columns.push(["samples/s", (p) => speed(p, fastest), "number"]);
    columns.push(status.mode === "async"
      ? ["clock", (p) => (p.gone || p.clock === ahead ? number(p.clock) : `${number(p.clock)} (−${number(ahead - p.clock)})`), "number"]
      : ["version", (p) => number(p.version), "number"]);
    columns.push(["now", now, "short"]);
    byId("workers-section").hidden = rows.length === 0;
    say(byId("workers-title"), status.said.length ? "Workers" : `Workers: ${there.length} there`);
    fill(byId("workers"), columns, rows, (p) => (p.gone ? "gone" : named(p.name) ? "culprit" : ""));
    byId("phases").hidden = !timed;
    if (timed && !byId("phases").children.length) {
      byId("phases").append(...Object.entries(PHASES).map(([name, word]) => {
        const item = element("li");
        item.append(element("span", "", `swatch phase-${name}`), word);
        return item;
      }));
    }
    staleness();
  }

  // Asynchronous mode: how stale weights were, and who was held at the bound.
  function staleness() {
    const box = byId("staleness");
    box.hidden = status.mode !== "async" || !status.waits;
    if (box.hidden) return;
    if (!box.children.length) {
      const wide = element("div", "", "wide");
      wide.tabIndex = 0;
      wide.setAttribute("role", "group");
      wide.setAttribute("aria-label", "Table of staleness");
      wide.append(element("table"));
      box.append(element("h3", "Staleness of the weights that slices were computed on"), wide, element("ul"));
    }
    const counts = status.waits.staleness;
    const all = counts.reduce((sum, count) => sum + count, 0);
    const most = Math.max(1, ...counts);
    const rows = counts.map((count, lacking) => ({ count, lacking })).filter((row) => row.count);
    fill(box.querySelector("table"), [
      ["updates behind", (row) => number(row.lacking), "number"],
      ["slices", (row) => number(row.count), "number"],
      ["share", (row) => {
        const box = element("div");
        const part = element("span", "", "measure");
        part.style.width = `${85 * row.count / most}%`;
        box.dataset.is = `${row.count} ${all} ${most}`;
        box.append(part, share(row.count / all));
        return box;
      }, "grow"],
    ], rows);
    list(box.querySelector("ul"), status.waits.held.slice(0, 10).map((held) =>
      `${held.worker} was held ${number(held.times)} times by ${held.by}, ${duration(held.seconds)} in all`));
  }

  // ---- hosts, servers, shards

  const hostOf = (process) => process.address.replace(/:\d+$/, "") || "no address";

  function hosts() {
    const found = new Map();
    for (const process of status.processes.filter((p) => !p.gone)) {
      found.set(hostOf(process), [...(found.get(hostOf(process)) ?? []), process]);
    }
    const box = byId("hosts");
    const is = JSON.stringify([...found].map(([host, those]) => [host, those.map((p) => [p.name, p.state])]));
    if (box.dataset.is === is) return;
    box.dataset.is = is;
    box.replaceChildren(...[...found].map(([host, those]) => {
      const card = element("div", "", "host");
      const chips = element("ul");
      chips.setAttribute("aria-label", `Processes on ${host}`);
      chips.append(...those.map((p) => {
        const chip = element("li", "", `chip ${kindOf(p.state)} ${named(p.name) ? "culprit" : ""}`);
        chip.append(`${SYMBOLS[kindOf(p.state)]} ${p.name}`);
        if (kindOf(p.state) !== "well") chip.append(` ${p.state}`);
        return chip;
      }));
      card.append(element("h3", host), chips);
      return card;
    }));
  }

  function servers() {
    const rows = status.processes.filter((p) => p.role !== "worker");
    const columns = [
      ["process", (p) => p.name, "name"],
      ["state", (p) => marked(p.state), (p) => kindOf(p.state)],
      ["address", (p) => p.address, ""],
      ["version", (p) => (p.server ? number(p.version) : ""), "number"],
      ["wire", (p) => (p.server ? `${bytes(p.bytes_per_s)}/s` : ""), "number"],
      ["weights", (p) => (p.server ? bytes(p.server.shard_bytes) : ""), "number"],
    ];
    columns.push(["why", (p) => hinted(p.reason), "short"]);
    fill(byId("servers"), columns, rows, (p) => (p.gone ? "gone" : named(p.name) ? "culprit" : ""));
    byId("shards").hidden = !status.shards;
    if (status.shards) {
      fill(byId("shards"), [
        ["shard", (s) => String(s.shard), "number"],
        ["copies", (s) => marked(s.state), (s) => kindOf(s.state)],
        ["primary", (s) => s.primary, ""],
        ["backups", (s) => s.backups.map((b) => (b.whole ? b.server : `${b.server} ${share(b.share)}`)).join(", "), "long"],
      ], status.shards);
    }
  }

  // ---- what has happened

  function worst() {
    const steps = status.waits?.worst ?? [];
    byId("worst-section").hidden = steps.length === 0;
    if (!steps.length) return;
    fill(byId("worst"), [
      [steps[0].asynchronous ? "clock" : "step", (s) => number(s.step), "number"],
      ["waited", (s) => duration(s.waited_s), "number"],
      ["for", (s) => s.member || "not known", "name"],
      ["slices", (s) => s.slices, ""],
      ["cause", (s) => (s.cause ? `${s.cause}, ${duration(s.cause_s)}` : ""), "long"],
    ], steps);
  }

  function happened() {
    const wanted = byId("event-filter").value.trim().toLowerCase();
    const shown = events.filter((e) => `${e.kind} ${e.text}`.toLowerCase().includes(wanted));
    say(byId("events-shown"), wanted ? `${shown.length} of ${events.length}` : "");
    fill(byId("events"), [
      ["time", (e) => clockTime(e.at_s), ""],
      ["version", (e) => number(e.version), "number"],
      ["event", (e) => [MARKS[e.kind]?.[0], e.text].filter(Boolean).join(" "), "long"],
    ], shown.reverse());
  }

  byId("event-filter").addEventListener("input", happened);

  // ---- for page.js

  function show(now, at_s) {
    status = now;
    remember(at_s);
    document.querySelector("main").hidden = false;
    head();
    workers();
    hosts();
    servers();
    worst();
  }

  function hear(fresh) {
    const known = new Set(events.map((e) => `${e.at_s} ${e.text}`));
    events.push(...fresh.filter((e) => !known.has(`${e.at_s} ${e.text}`)));
    events.sort((a, b) => a.at_s - b.at_s).splice(0, Math.max(0, events.length - 100));
    happened();
  }

  function ledger(found) {
    const all = found.begun > found.epochs.length ? [{ ...found.total, epoch: null }] : [];
    fill(byId("ledger"), [
      ["epoch", (e) => (e.epoch === null ? "all" : number(e.epoch + 1)), "number"],
      ["samples", (e) => number(e.samples), "number"],
      ["once", (e) => number(e.once), "number"],
      ["twice", (e) => number(e.twice), (e) => (e.twice ? "number bad" : "number")],
      ["never", (e) => number(e.never), "number"],
      ["skipped", (e) => number(e.skipped), (e) => (e.skipped ? "number bad" : "number")],
      ["slices by worker", (e) => Object.entries(e.workers).map(([name, count]) => `${name} ${number(count)}`).join(", "), "long"],
    ], [...all, ...found.epochs]);
  }

  function settings(found) {
    fill(byId("settings"), [
      ["setting", (s) => s.key, ""],
      ["value", (s) => s.value, ""],
      ["from", (s) => s.origin, ""],
      ["meaning", (s) => s.description, "long"],
    ], found.settings);
  }

  for (const button of byId("axis").children) {
    button.addEventListener("click", () => charts.turn(events, button.dataset.axis));
  }

  return { show, hear, ledger, settings, draw: () => charts.draw(events), status: () => status };
})();
