"use strict";
// Helpers of the page. Names and texts of the job are only ever set as textContent.

const byId = (id) => document.getElementById(id);

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Text with the class "only-read" is for screen readers.
const onlyRead = (text) => element("span", text, "only-read");

// Changes nothing if the text is the same: a selection of the reader stays.
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function number(value) {
  if (typeof value !== "number") return String(value ?? "");
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

// A number of a curve with so many digits that count.
function compact(value, digits = 3) {
  const rounded = Number(value.toPrecision(digits));
  return value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) ? rounded.toExponential() : String(rounded);
}

// The labels of an axis, with as many digits as tell where each tick lies.
function distinct(ticks) {
  const fine = 0.05 * Math.abs(ticks[1] - ticks[0]) || Infinity;
  const all = [1, 2, 3, 4, 5, 6, 7, 8].map((digits) => ticks.map((y) => compact(y, digits)));
  return all.find((texts) => texts.every((text, at) => Math.abs(Number(text) - ticks[at]) <= fine)) ?? all.at(-1);
}

function scaled(value, units) {
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value.toFixed(at ? 1 : 0)} ${units[at]}`;
}
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"]);

function duration(seconds) {
  if (seconds >= 100) return `${Math.round(seconds)} s`;
  return seconds >= 1 ? `${seconds.toFixed(1)} s` : `${Math.round(1000 * seconds)} ms`;
}

const share = (part) => (part > 0 && part < 0.01 ? "<1 %" : `${Math.round(100 * part)} %`);

const clockTime = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};

// States have a symbol and a word besides their colour.
const SYMBOLS = { well: "●", wait: "◐", bad: "▲" };
const WELL = new Set(["training", "done", "replicated"]);
const BAD = new Set(["failed", "stuck", "degraded", "lost", "no backup"]);
const kindOf = (state) => (WELL.has(state) ? "well" : BAD.has(state) ? "bad" : "wait");
const marked = (state) => `${SYMBOLS[kindOf(state)]} ${state}`;

// Fill a table. columns: [title, function of a row -> text or node, class of the cell or function of a row -> class].
// Cells whose text stays are not touched. A node stays, too, if its `dataset.is` stays.
function fill(table, columns, rows, classOf = () => "") {
  const titles = columns.map(([title]) => title).join("|");
  if (table.dataset.titles !== titles) {
    const head = element("tr");
    for (const [title, , kind] of columns) {
      const cell = element("th", title, typeof kind === "string" ? kind : "");
      cell.scope = "col";
      head.append(cell);
    }
    const thead = element("thead");
    thead.append(head);
    table.replaceChildren(thead, element("tbody"));
    table.dataset.titles = titles;
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, index) => {
    let line = body.rows[index];
    if (!line) {
      line = element("tr");
      for (const _ of columns) line.append(element("td"));
      body.append(line);
    }
    line.className = classOf(row);
    columns.forEach(([, show, kind], at) => put(line.cells[at], show(row), typeof kind === "function" ? kind(row) : kind));
  });
}

function put(cell, shown, className = "") {
  if (cell.className !== className) cell.className = className;
  if (!(shown instanceof Node)) return say(cell, shown);
  if (cell.firstChild?.dataset?.is !== undefined && cell.firstChild.dataset.is === shown.dataset.is) return;
  cell.replaceChildren(shown);
}

function list(box, sentences) {
  box.hidden = sentences.length === 0;
  if (box.dataset.is === sentences.join("\n")) return;
  box.dataset.is = sentences.join("\n");
  box.replaceChildren(...sentences.map((sentence) => element("li", sentence)));
}
