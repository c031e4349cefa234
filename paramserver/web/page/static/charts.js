"use strict";
// Curves over time or steps with uPlot, with the events of the job as marks in them, and a table for each.

// By kind of event: symbol, word, colour of the style sheet. Kinds without a symbol are not drawn.
const MARKS = {
  lost: ["▲", "lost", "--bad"],
  takeover: ["⇄", "takeover", "--mark"],
  "went back": ["↶", "went back", "--bad"],
  "taken over": ["⇄", "takeover", "--mark"],
  joined: ["+", "joined", "--well"],
  left: ["−", "left", "--soft"],
  mode: ["M", "mode", "--mark"],
  checkpoint: ["✓", "checkpoint", "--soft"],
};
const TABLE_ROWS = 60;
const TITLES = { samples_per_s: "samples per second" };

const charts = (() => {
  const moments = []; // {at_s, version, values: {name: number or null}}
  let names = [];
  let marks = [];
  let axis = "time";
  const drawn = new Map(); // by name: {figure, plot, points}

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // All moments at once, in columns as in /api/v1/series. Those before them stay: a new coordinator knows only its own.
  function load(series) {
    const begin = series.at_s[0] ?? Infinity;
    moments.splice(0, moments.length, ...moments.filter((m) => m.at_s < begin));
    series.at_s.forEach((at_s, index) => {
      const values = { samples_per_s: series.samples_per_s[index] };
      for (const [name, column] of Object.entries(series.values)) values[name] = column[index];
      moments.push({ at_s, version: series.version[index], values });
    });
    names = order([...names, ...Object.keys(series.values)]);
  }

  // One more moment. When the room is full, every other moment goes.
  function add(at_s, status) {
    if (moments.length && moments.at(-1).at_s >= at_s) return;
    moments.push({ at_s, version: status.version, values: { samples_per_s: status.samples_per_s, ...status.metrics } });
    names = order([...names, ...Object.keys(status.metrics)]);
    if (moments.length >= 1200) moments.splice(0, moments.length, ...moments.filter((_, index) => index % 2 === 0));
  }

  // Losses first, then other values, then the speed.
  function order(found) {
    const rank = (name) => (name === "samples_per_s" ? 2 : /loss/i.test(name) ? 0 : 1);
    return [...new Set([...found, "samples_per_s"])].slice(0, 34).sort((a, b) => rank(a) - rank(b));
  }

  // [x, y] in columns. Over steps, what came before a return to a checkpoint is left out: x only rises.
  function columns(name) {
    let points = moments.map((m) => [axis === "time" ? m.at_s : m.version, m.values[name]])
      .map(([x, y]) => [x, Number.isFinite(y) ? y : null]);
    if (axis === "steps") {
      const rising = [];
      for (const point of points) {
        while (rising.length && rising.at(-1)[0] >= point[0]) rising.pop();
        rising.push(point);
      }
      points = rising;
    }
    const first = points.findIndex(([, y]) => y !== null);
    points = first < 0 ? [] : points.slice(first);
    return [points.map(([x]) => x), points.map(([, y]) => y)];
  }

  const showX = (x) => (axis === "time" ? clockTime(x) : `step ${number(x)}`);

  // Lines for events, with the symbol at the top; checkpoints come often and have no line.
  function drawMarks(plot) {
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const dot = devicePixelRatio;
    ctx.save();
    ctx.font = `${12 * dot}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    let last = -Infinity; // where the last symbol stands: symbols of the same moment stand side by side
    for (const mark of marks) {
      const x = Math.round(plot.valToPos(axis === "time" ? mark.at_s : mark.version, "x", true));
      if (x < left || x > left + width) continue;
      const [symbol, , name] = MARKS[mark.kind];
      ctx.strokeStyle = ctx.fillStyle = colour(name);
      ctx.lineWidth = dot;
      if (mark.kind === "checkpoint") {
        ctx.fillText(symbol, x, top + height - 3 * dot);
        continue;
      }
      ctx.setLineDash([4 * dot, 3 * dot]);
      ctx.beginPath();
      ctx.moveTo(x, top + 14 * dot);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      last = Math.max(x, last + 13 * dot);
      ctx.fillText(symbol, last, top + 11 * dot);
    }
    ctx.restore();
  }

  // The caption says the value under the pointer, and an event near it.
  function readout(one, plot) {
    const { idx, left } = plot.cursor;
    const [xs, ys] = plot.data;
    if (idx == null || left < 0 || ys[idx] == null) return say(one.caption, summary(one));
    const near = marks.filter((mark) =>
      Math.abs(plot.valToPos(axis === "time" ? mark.at_s : mark.version, "x") - left) < 6).at(-1);
    say(one.caption, `${one.title}: ${number(ys[idx])} at ${showX(xs[idx])}${near ? `, ${near.text}` : ""}`);
  }

  function summary(one) {
    const values = one.columns[1].filter((y) => y !== null);
    if (!values.length) return one.title;
    const low = values.reduce((a, b) => Math.min(a, b));
    const high = values.reduce((a, b) => Math.max(a, b));
    return `${one.title}: ${number(values.at(-1))} (${compact(low)} – ${compact(high)})`;
  }

  function make(name) {
    const one = { title: TITLES[name] ?? name, columns: columns(name), figure: element("figure") };
    one.figure.dataset.name = name;
    one.caption = element("figcaption");
    one.place = element("div", "", "plot");
    one.place.setAttribute("role", "img");
    one.details = element("details");
    one.summary = element("summary", "as a table");
    one.summary.append(onlyRead(`: ${one.title}`));
    one.table = element("table");
    one.details.append(one.summary, one.table);
    one.details.addEventListener("toggle", () => tabulate(one));
    one.figure.append(one.caption, one.place, one.details);
    byId("charts").append(one.figure);
    const line = (grid) => ({ stroke: () => colour("--soft"), font: "11px system-ui, sans-serif",
      grid: { show: grid, stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1 } });
    one.plot = new uPlot({
      width: Math.max(200, one.place.clientWidth), height: 150, ms: 1e-3, padding: [6, 24, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "curves" }, drag: { x: false, y: false }, y: false },
      scales: { x: { time: false, range: span }, y: { range: room } },
      axes: [
        { ...line(false), size: 26, space: 70,
          values: (_, ticks) => ticks.map((x) => (axis === "time" ? clockTime(x) : number(x))),
          incrs: () => (axis === "time" ? TIMES : STEPS) },
        { ...line(true), size: 60, space: 28, values: (_, ticks) => distinct(ticks) },
      ],
      series: [{}, { stroke: () => colour("--curve"), width: 2, points: { show: false } }],
      hooks: { draw: [drawMarks], setCursor: [(plot) => readout(one, plot)] },
    }, one.columns, one.place);
    return one;
  }

  const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const STEPS = [1, 2, 5].flatMap((n) => [...Array(12).keys()].map((p) => n * 10 ** p)).sort((a, b) => a - b);

  // All curves begin and end at the same places, so that events stand one above the other.
  function span() {
    const shown = moments.filter((m) => axis === "steps" || m.version > 0 || moments.at(-1).version === 0);
    const xs = (shown.length ? shown : moments).map((m) => (axis === "time" ? m.at_s : m.version));
    const [low, high] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
    return high > low ? [low, high] : [low, low + 1];
  }

  // A curve that hardly moves is drawn in the middle, and its noise does not fill the chart.
  function room(_, low, high) {
    if (low === null || high === null) return [0, 1];
    const pad = Math.max((high - low) * 0.08, Math.abs(high) * 0.005, 1e-9);
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }

  function tabulate(one) {
    if (!one.details.open) return;
    const [xs, ys] = one.columns;
    const rows = xs.map((x, index) => [x, ys[index]]).slice(-TABLE_ROWS).reverse();
    fill(one.table, [[axis === "time" ? "time" : "step", ([x]) => showX(x), ""],
      [one.title, ([, y]) => (y === null ? "none" : number(y)), "number"]], rows);
  }

  function draw(events) {
    marks = events.filter((event) => MARKS[event.kind]);
    const shown = [...new Map(marks.map((mark) => [MARKS[mark.kind][1], MARKS[mark.kind][0]]))];
    list(byId("marks"), shown.map(([word, symbol]) => `${symbol} ${word}`));
    for (const name of names) {
      let one = drawn.get(name);
      if (!one) {
        if (columns(name)[0].length < 2) continue;
        one = make(name);
        drawn.set(name, one);
      }
      one.columns = columns(name);
      one.plot.setData(one.columns);
      say(one.caption, summary(one));
      one.place.setAttribute("aria-label", `Curve of ${summary(one)}: the newest value, the lowest and the highest. The table below has the numbers.`);
      tabulate(one);
    }
    const right = names.filter((name) => drawn.has(name)).map((name) => drawn.get(name).figure);
    if (right.some((figure, index) => byId("charts").children[index] !== figure)) byId("charts").append(...right);
  }

  function fit() {
    for (const one of drawn.values()) one.plot.setSize({ width: Math.max(200, one.place.clientWidth), height: 150 });
  }

  addEventListener("resize", fit);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", fit);

  function turn(events, wanted) {
    axis = wanted;
    for (const button of byId("axis").children) button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
    draw(events);
  }

  return { load, add, draw, turn };
})();
