"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

// Elements are made from text only: no string of the data is ever parsed as HTML.
function make(parent, tag, attributes = {}, text) {
  const space = parent.namespaceURI === SVG || tag === "svg" ? SVG : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

const tip = document.getElementById("tip");
function showsOnHover(element, text) {
  element.setAttribute("tabindex", "0");
  element.setAttribute("aria-label", text);
  const show = () => {
    const box = element.getBoundingClientRect();
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, box.top - tip.offsetHeight - 6)}px`;
  };
  for (const event of ["mouseenter", "focus"]) element.addEventListener(event, show);
  for (const event of ["mouseleave", "blur"]) element.addEventListener(event, () => { tip.hidden = true; });
}

// --- tables ---------------------------------------------------------------------------------------------------------

function sortKey(text) {
  const number = parseFloat(text.replace(/[−–]/g, "-").replace(/,/g, ""));
  return Number.isNaN(number) ? null : number;
}

function showTable(parent, table) {
  const [head, rows] = table.grid;
  make(parent, "h3", {}, table.title);
  const element = make(make(parent, "div", { class: "scroll" }), "table");
  const line = make(make(element, "thead"), "tr");
  const body = make(element, "tbody");
  const numbers = table.heads.length;
  head.forEach((name, place) => {
    const cell = make(line, "th", { scope: "col", class: place < numbers ? "" : "number" });
    make(cell, "button", { type: "button" }, name).addEventListener("click", () => {
      const ascending = cell.getAttribute("aria-sort") !== "ascending";
      for (const other of line.children) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const order = [...body.children].sort((one, other) => {
        const [a, b] = [one, other].map((row) => row.children[place].textContent);
        const [x, y] = [sortKey(a), sortKey(b)];
        if ((x === null) !== (y === null)) return x === null ? 1 : -1; // what is missing stays at the end
        return (ascending ? 1 : -1) * (x === null ? a.localeCompare(b) : x - y);
      });
      body.append(...order);
    });
  });
  for (const row of rows) {
    const cells = make(body, "tr");
    row.forEach((text, place) => make(cells, "td", {
      class: place < numbers ? "" : head[place].endsWith("(paper)") ? "number paper" : "number",
    }, text));
  }
  for (const note of table.footnotes) make(parent, "p", { class: "note" }, note);
}

// --- figures --------------------------------------------------------------------------------------------------------

const WIDTH = 420, HEIGHT = 260, LEFT = 52, RIGHT = 12, TOP = 26, BOTTOM = 40;
const short = (value) => (Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3))));

function ticks(low, high) {
  const raw = (high - low) / 5 || 1, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(at);
  return found;
}

function chart(svg, panel) {
  const values = panel.series.flatMap((each) => each.y.flatMap((y, i) => [y - (each.sd[i] || 0), y + (each.sd[i] || 0)]));
  const bars = panel.kind === "bars";
  let low = Math.min(...values), high = Math.max(...values);
  if (bars) { low = Math.min(0, low); high = Math.max(0, high); }
  const space = (high - low || 1) * 0.06;
  if (!bars || low < 0) low -= space;
  high += space;
  const xs = [...new Set(panel.series.flatMap((each) => each.x))].sort((a, b) => a - b);
  const inner = WIDTH - LEFT - RIGHT;
  const across = (x) => LEFT + inner * (xs.indexOf(x) + 0.5) / xs.length;
  const up = (y) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (y - low) / (high - low));
  for (const at of ticks(low, high)) {
    make(svg, "line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: up(at), y2: up(at) });
    make(svg, "text", { x: LEFT - 6, y: up(at) + 4, "text-anchor": "end", class: "soft" }, short(at));
  }
  for (const x of xs) make(svg, "text", { x: across(x), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle", class: "soft" }, short(x));
  panel.series.forEach((each, number) => {
    const color = data.colors[each.name], wide = 0.8 * inner / xs.length / panel.series.length;
    const shift = bars ? (number - (panel.series.length - 1) / 2) * wide : 0;
    if (!bars) {
      const points = each.x.map((x, i) => `${across(x)},${up(each.y[i])}`).join(" ");
      make(svg, "polyline", { points, fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": number % 2 ? "6 3" : "" });
    }
    each.x.forEach((x, i) => {
      const y = each.y[i], sd = each.sd[i], middle = across(x) + shift;
      const mark = bars
        ? make(svg, "rect", { x: middle - wide * 0.46, width: wide * 0.92, y: Math.min(up(y), up(0)), height: Math.max(1, Math.abs(up(y) - up(0))), fill: color })
        : make(svg, "circle", { cx: middle, cy: up(y), r: 4, fill: color });
      if (sd) make(svg, "line", { x1: middle, x2: middle, y1: up(y - sd), y2: up(y + sd), class: "axis" });
      showsOnHover(mark, `${each.name}, ${panel.x_label} ${x}: ${short(y)}${sd ? ` ± ${short(sd)}` : ""}`);
    });
  });
  make(svg, "line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM });
}

function heat(svg, panel) {
  const all = panel.values.flat().filter((value) => value !== null);
  const top = Math.max(...all.map(Math.abs)) || 1;
  const wide = (WIDTH - LEFT - RIGHT) / panel.columns.length, tall = (HEIGHT - TOP - BOTTOM) / panel.rows.length;
  panel.values.forEach((row, i) => row.forEach((value, j) => {
    if (value === null) return;
    const share = value / top, [x, y] = [LEFT + j * wide, TOP + i * tall];
    const color = share < 0 ? `rgba(230, 97, 1, ${-share})` : `rgba(0, 114, 178, ${share})`;
    const cell = make(svg, "rect", { x, y, width: wide - 1, height: tall - 1, fill: color });
    make(svg, "text", { x: x + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle", "pointer-events": "none", style: Math.abs(share) > 0.6 ? "fill: #fff" : "" },
      (panel.signed && value > 0 ? "+" : "") + short(value));
    showsOnHover(cell, `${panel.y_label} ${panel.rows[i]}, ${panel.x_label} ${panel.columns[j]}: ${short(value)}`);
  }));
  panel.rows.forEach((name, i) => make(svg, "text", { x: LEFT - 6, y: TOP + (i + 0.5) * tall + 4, "text-anchor": "end", class: "soft" }, name));
  panel.columns.forEach((name, j) => make(svg, "text", { x: LEFT + (j + 0.5) * wide, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle", class: "soft" }, name));
}

function showFigure(parent, figure) {
  const element = make(parent, "figure", { id: `figure-${figure.name}` });
  const names = [...new Set(figure.panels.flatMap((panel) => panel.series.map((each) => each.name)))];
  const legend = make(element, "div", { class: "legend" });
  for (const name of names) make(legend, "span", { style: `--c: ${data.colors[name]}` }, name);
  const panels = make(element, "div", { class: "panels" });
  for (const panel of figure.panels) {
    const svg = make(panels, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${figure.caption} ${panel.title}` });
    make(svg, "text", { x: LEFT, y: 16, "font-weight": 600 }, panel.title);
    make(svg, "text", { x: WIDTH / 2, y: HEIGHT - 6, "text-anchor": "middle", class: "soft" }, panel.x_label);
    make(svg, "text", { x: 12, y: HEIGHT / 2, "text-anchor": "middle", class: "soft", transform: `rotate(-90 12 ${HEIGHT / 2})` }, panel.y_label);
    (panel.kind === "heat" ? heat : chart)(svg, panel);
  }
  make(element, "figcaption", {}, figure.caption);
}

// --- answers --------------------------------------------------------------------------------------------------------

const SHOWN = 50;
function choice(parent, label, options) {
  const select = make(make(parent, "label", {}, label), "select", { "aria-label": label });
  for (const [value, text] of options) make(select, "option", { value }, text);
  return select;
}

function showAnswers(parent) {
  const controls = make(parent, "div", { class: "controls" });
  const which = choice(controls, "Benchmark", data.answers.map((each, i) => [i, each.depth ? `${each.benchmark}, K = ${each.depth}` : each.benchmark]));
  const first = choice(controls, "Method A", []), second = choice(controls, "Method B", []);
  const filter = choice(controls, "Show", [["all", "all problems"], ["fixed", "right with A, wrong with B"],
    ["broken", "wrong with A, right with B"], ["both", "wrong with both"], ["missing", "no answer in A or B"]]);
  const search = make(make(controls, "label", {}, "Text"), "input", { type: "search", "aria-label": "Text" });
  const count = make(parent, "p", { class: "note", "aria-live": "polite" });
  const list = make(parent, "div");
  function methods() {
    const names = Object.keys(data.answers[which.value].methods);
    for (const [select, start] of [[first, Math.max(0, names.indexOf("Loop Dropout"))], [second, Math.max(0, names.indexOf("LoRA"))]]) {
      select.replaceChildren();
      for (const name of names) make(select, "option", { value: name }, name);
      select.value = names[start] ?? names[0];
    }
    show();
  }
  function show() {
    const set = data.answers[which.value], a = set.methods[first.value].answers, b = set.methods[second.value].answers;
    const wanted = {
      all: () => true, fixed: (x, y) => x === "right" && y !== "right", broken: (x, y) => x !== "right" && y === "right",
      both: (x, y) => x !== "right" && y !== "right", missing: (x, y) => x === "missing" || y === "missing",
    }[filter.value];
    const words = search.value.toLowerCase();
    const found = set.problems.map((_, i) => i).filter((i) => wanted(a[i][0], b[i][0]) &&
      (!words || set.problems[i].prompt.toLowerCase().includes(words) || a[i][2].toLowerCase().includes(words)));
    count.textContent = `${found.length} of ${set.problems.length} problems` + (found.length > SHOWN ? `; the first ${SHOWN} are shown.` : ".") +
      (set.total > set.problems.length ? ` The benchmark has ${set.total}; the others are in the evaluation's file.` : "");
    list.replaceChildren();
    for (const i of found.slice(0, SHOWN)) {
      const problem = set.problems[i], box = make(list, "article", { class: "problem" });
      make(box, "strong", {}, `Problem ${problem.id}`);
      make(box, "pre", {}, problem.prompt);
      make(box, "p", { class: "note" }, `Reference: ${problem.reference}`);
      const side = make(box, "div", { class: "side" });
      const names = [...new Set([first.value, second.value, ...Object.keys(set.methods)])];
      for (const name of names) {
        const [verdict, extracted, completion] = set.methods[name].answers[i];
        const cell = make(side, "div", { class: verdict });
        make(cell, "strong", {}, name);
        make(cell, "div", { class: "verdict" }, verdict === "missing" ? "no answer" : `${verdict}: ${extracted}`);
        make(cell, "pre", {}, completion);
      }
    }
  }
  which.addEventListener("change", methods);
  for (const each of [first, second, filter]) each.addEventListener("change", show);
  search.addEventListener("input", show);
  methods();
}

// --- the page -------------------------------------------------------------------------------------------------------

document.title = document.getElementById("title").textContent = data.title;
const section = (name) => document.getElementById(name);
data.tables.forEach((table) => showTable(section("tables"), table));
data.figures.forEach((figure) => showFigure(section("figures"), figure));
if (data.answers.length) showAnswers(section("answers"));
else make(section("answers"), "p", { class: "note" }, "No run in these folders has kept its answers.");
for (const run of data.runs) {
  const box = make(section("runs"), "details", { class: "run" });
  make(box, "summary", {}, `${run.method}${run.seed === null || run.seed === undefined ? "" : `, seed ${run.seed}`}: ${run.path}`);
  make(box, "pre", {}, JSON.stringify({ settings: run.settings, cost: run.cost, device: run.device, versions: run.versions }, null, 1));
}
if (!data.figures.length) make(section("figures"), "p", { class: "note" }, "These runs have nothing to draw.");
for (const each of document.querySelectorAll("main > section")) {
  make(document.getElementById("nav"), "a", { href: `#${each.id}` }, each.querySelector("h2").textContent);
}
