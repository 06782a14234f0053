"use strict";
// Elements are made from text only: no string of the data is ever parsed as HTML.
function make(parent, tag, attributes = {}, text) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// A click on a head sorts its table; what is missing stays at the end.
const number = (text) => parseFloat(text.replace(/[−–]/g, "-").replace(/,/g, ""));
for (const cell of document.querySelectorAll("th")) {
  cell.addEventListener("click", () => {
    const rows = cell.closest("table").tBodies[0], place = cell.cellIndex;
    const ascending = cell.getAttribute("aria-sort") !== "ascending";
    for (const other of cell.parentNode.children) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    rows.append(...[...rows.children].sort((one, other) => {
      const [a, b] = [one, other].map((row) => row.children[place].textContent), [x, y] = [number(a), number(b)];
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
      return (ascending ? 1 : -1) * (Number.isNaN(x) ? a.localeCompare(b) : x - y);
    }));
  });
}

const SHOWN = 50, answers = JSON.parse(document.getElementById("data").textContent);
const section = document.getElementById("answers");
function choice(parent, label, options) {
  const select = make(make(parent, "label", {}, label), "select", { "aria-label": label });
  for (const [value, text] of options) make(select, "option", { value }, text);
  return select;
}
if (answers.length) {
  const controls = make(section, "div", { class: "controls" });
  const which = choice(controls, "Benchmark", answers.map((each, place) => [place, each.benchmark]));
  const first = choice(controls, "A", []), second = choice(controls, "B", []);
  const filter = choice(controls, "Show", [["all", "all problems"], ["fixed", "right with A, wrong with B"],
    ["broken", "wrong with A, right with B"], ["both", "wrong with both"], ["missing", "no answer in A or B"]]);
  const search = make(make(controls, "label", {}, "Text"), "input", { type: "search", "aria-label": "Text" });
  const count = make(section, "p", { class: "note" }), list = make(section, "div");
  const wanted = {
    all: () => true, fixed: (a, b) => a === "right" && b !== "right", broken: (a, b) => a !== "right" && b === "right",
    both: (a, b) => a !== "right" && b !== "right", missing: (a, b) => a === "missing" || b === "missing",
  };
  const methods = () => {
    const names = Object.keys(answers[which.value].methods), of = (word) => names.findIndex((name) => name.startsWith(word));
    for (const [select, start] of [[first, of("Loop Dropout")], [second, of("LoRA")]]) {
      select.replaceChildren();
      for (const name of names) make(select, "option", { value: name }, name);
      select.value = names[Math.max(0, start)];
    }
    show();
  };
  const show = () => {
    const set = answers[which.value], a = set.methods[first.value], b = set.methods[second.value];
    const words = search.value.toLowerCase();
    const found = set.problems.map((_, i) => i).filter((i) => wanted[filter.value](a[i][0], b[i][0]) &&
      (set.problems[i][1] + a[i][2]).toLowerCase().includes(words));
    count.textContent = `${found.length} of ${set.total} problems; at most ${SHOWN} are shown.`;
    list.replaceChildren();
    for (const i of found.slice(0, SHOWN)) {
      const [id, prompt, reference] = set.problems[i], box = make(list, "article", { class: "problem" });
      make(box, "strong", {}, `Problem ${id || i}`);
      make(box, "pre", {}, prompt);
      make(box, "p", { class: "note" }, `Reference: ${reference}`);
      const side = make(box, "div", { class: "side" });
      for (const name of new Set([first.value, second.value, ...Object.keys(set.methods)])) {
        const [verdict, extracted, completion] = set.methods[name][i], cell = make(side, "div", { class: verdict });
        make(cell, "strong", {}, `${name}: ${verdict === "missing" ? "no answer" : `${verdict}, ${extracted}`}`);
        make(cell, "pre", {}, completion);
      }
    }
  };
  which.addEventListener("change", methods);
  for (const each of [first, second, filter]) each.addEventListener("change", show);
  search.addEventListener("input", show);
  methods();
} else make(section, "p", { class: "note" }, "No run in these folders has kept its answers.");
