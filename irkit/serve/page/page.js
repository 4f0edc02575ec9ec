// The page: its state (in the fragment of the address, which is never sent), searching, and keys.

import { ask, Refusal, route, useKey } from "./api.js";
import { button, element } from "./elements.js";
import { clearButton, countValues, makeFilter, showFacets } from "./facets.js";
import { compareHits, showHits } from "./hits.js";

const PAUSE = 120; // milliseconds without a key until a search begins
const STEP = 10; // hits
const MOST = 100;

const find = (id) => document.getElementById(id);
const state = { query: "", systems: [], by: [], chosen: {}, k: STEP, long: new Set() };
let indexes = [];
let models = [];
let searching = new AbortController();
let counting = new AbortController();
let timer = 0;
let typed = null; // what was typed since the last search; it stays while the indexes are not known yet

// ---- state: a system is what a column searches, an index by name and those fused with it; `by` has for each
// ---- column the model that ranks the hits again, or ""

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const known = (name) => indexes.some((index) => index.name === name);
  state.query = given.get("q") ?? "";
  state.k = STEP;
  const systems = given.getAll("in").map((names) => [parse(names, [])].flat().filter(known));
  state.systems = systems.filter((names) => names.length).slice(0, 2);
  if (state.systems.length === 0) state.systems = [[indexes[0].name]];
  const by = given.getAll("by");
  state.by = state.systems.map((_, number) => models.find((model) => model === by[number]) ?? "");
  const chosen = Object.entries(parse(given.get("filter"), {}));
  state.chosen = Object.fromEntries(chosen.filter(([, values]) => values && typeof values === "object"));
}

function parse(text, otherwise) {
  try {
    return JSON.parse(text) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function writeAddress() {
  const given = new URLSearchParams();
  if (state.query) given.set("q", state.query);
  for (const names of state.systems) given.append("in", JSON.stringify(names));
  if (state.by.some((name) => name)) for (const name of state.by) given.append("by", name);
  if (makeFilter(state.chosen)) given.set("filter", JSON.stringify(makeFilter(state.chosen)));
  history.replaceState(null, "", `#${given}`);
}

const indexOf = (name) => indexes.find((index) => index.name === name);

// ---- columns ----

/** Make a column for each system, with its choice of indexes; hits come later. */
function makeColumns() {
  find("compare").checked = state.systems.length > 1;
  const old = [...find("columns").children]; // their hits stay until there are others
  find("columns").replaceChildren(...state.systems.map((names, number) => {
    const main = indexOf(names[0]);
    const select = element("select", { id: `index-${number}` }, ...indexes.map((index) =>
      element("option", { value: index.name, selected: index.name === names[0] }, index.name)));
    select.addEventListener("change", () => setSystem(number, [select.value]));
    const count = `${main.documents.toLocaleString("en")} documents`;
    const facts = new Set([main.parts.join(", "), main.model, main.kind, count]);
    const title = state.systems.length > 1 ? `${number + 1}` : "";
    const heading = element("h2", { class: "hidden", id: `column-${number}` }, `Hits ${title}`.trim());
    return element("section", { class: "column", "aria-labelledby": heading.id }, heading,
      element("div", { class: "choice" },
        element("label", { for: `index-${number}` }, "Index ", element("b", {}, title)), select,
        fuseChoice(names, number), ...rankChoice(number), element("p", { class: "facts" }, [...facts].join(" · "))),
      old[number]?.querySelector(".status") ?? element("p", { class: "status", role: "status" }),
      old[number]?.querySelector(".list") ?? element("div", { class: "list" }));
  }));
}

/** Return a choice of the indexes that are fused with the main one. */
function fuseChoice(names, number) {
  const others = indexes.filter((index) => index.name !== names[0]);
  if (others.length === 0) return null;
  const boxes = others.map((index) => {
    const checked = names.includes(index.name);
    const box = element("input", { type: "checkbox", value: index.name, checked });
    box.addEventListener("change", () => {
      const rest = names.filter((name) => name !== index.name);
      setSystem(number, box.checked ? [...rest, index.name] : rest, index.name);
    });
    return element("label", {}, box, ` ${index.name} (${index.parts.join(", ")})`);
  });
  const fused = names.slice(1).join(", ");
  return element("details", { class: "fuse", open: names.length > 1 },
    element("summary", {}, fused ? `fused with ${fused}` : "fuse with …"), ...boxes);
}

/** Return a choice of the model that ranks the hits again. */
function rankChoice(number) {
  if (models.length === 0) return [];
  const id = `by-${number}`;
  const select = element("select", { id }, ...["", ...models].map((name) =>
    element("option", { value: name, selected: name === state.by[number] }, name || "this index")));
  select.addEventListener("change", () => {
    state.by[number] = select.value;
    search();
  });
  return [element("label", { for: id }, "Ranked by "), select];
}

function setSystem(number, names, focus = null) {
  const narrow = number === 0 && names[0] !== state.systems[0][0];
  state.systems[number] = names;
  if (narrow) state.chosen = {};
  makeColumns();
  const column = find("columns").children[number];
  const boxes = [...column.querySelectorAll(".fuse input")];
  (boxes.find((box) => box.value === focus) ?? column.querySelector("select")).focus();
  if (narrow) showFilters();
  search();
}

// ---- searching ----

/**
 * Search with each system, and show hits and differences; a search that begins later replaces this one.
 * `more` is the column that asks for more hits: what is open stays open, and its first new hit is focused.
 */
async function search(more = -1) {
  clearTimeout(timer);
  writeAddress();
  searching.abort();
  searching = new AbortController();
  const { signal } = searching;
  const columns = [...find("columns").children];
  find("difference").hidden = true;
  if (state.query.trim() === "") {
    for (const column of columns) showAnswer(column, null, 0);
    return;
  }
  find("results").setAttribute("aria-busy", "true");
  const answers = await Promise.all(state.systems.map((_, number) => searchSystem(number, signal)));
  if (signal.aborted) return;
  find("results").removeAttribute("aria-busy");
  const lists = answers.map((answer) => answer.results?.[0].hits ?? null);
  const both = lists.length === 2 && lists.every((list) => list !== null);
  columns.forEach((column, number) => {
    const difference = both ? compareHits(lists[number], lists[1 - number], 2 - number) : null;
    const open = more < 0 ? [] : [...column.querySelectorAll(".title[aria-expanded=true]")];
    const ids = new Set(open.map((title) => title.dataset.id));
    showAnswer(column, answers[number], number, difference, ids);
  });
  columns[more]?.querySelectorAll(".title")[state.k - STEP]?.focus();
  if (both) showDifference(...lists);
}

async function searchSystem(number, signal) {
  const [main, ...others] = state.systems[number];
  const body = { queries: state.query, k: state.k, filter: makeFilter(state.chosen) };
  Object.assign(body, { snippet: true, fields: ["title", "metadata"] }); // whole texts stay on the server
  if (others.length) body.fuse = { indexes: others };
  if (state.by[number]) body.rerank = { by: state.by[number] };
  try {
    return await ask(route(main, "search"), body, signal);
  } catch (error) {
    return refused(error);
  }
}

/** Return the message of an error; ask for a key if one is missing. */
function refused(error) {
  if (error.name === "AbortError") return { message: "" };
  if (!(error instanceof Refusal)) throw error;
  if (error.status === 401) askForKey();
  return { message: error.message };
}

function showAnswer(column, answer, number, difference = null, open = new Set()) {
  const status = column.querySelector(".status");
  const list = column.querySelector(".list");
  status.classList.toggle("problem", Boolean(answer?.message));
  if (answer === null || answer.message !== undefined) {
    status.textContent = answer?.message ?? "Type to search.";
    list.replaceChildren();
    return;
  }
  const { hits } = answer.results[0];
  const time = `${Math.max(1, Math.round(1000 * answer.seconds))} ms`;
  const found = `${hits.length} of ${answer.documents.toLocaleString("en")} documents, ${time}`;
  status.textContent = hits.length ? found : "Nothing found. Try other words or fewer filters.";
  const systems = state.systems[number].map(indexOf);
  list.replaceChildren(showHits(hits, state.query, systems, state.by[number], difference, open));
  if (hits.length >= state.k && state.k < MOST) {
    list.append(button("More hits", { class: "link" }, () => {
      state.k += STEP;
      search([...find("columns").children].indexOf(column));
    }));
  }
}

function showDifference(one, other) {
  const ids = new Set(other.map((hit) => hit.id));
  const both = one.filter((hit) => ids.has(hit.id)).length;
  const moved = one.filter((hit, rank) => ids.has(hit.id) && other[rank]?.id !== hit.id).length;
  find("difference").textContent = `In both columns: ${both}, of these at other ranks: ${moved}. `
    + `Only in column 1: ${one.length - both}. Only in column 2: ${other.length - both}.`;
  find("difference").hidden = false;
}

// ---- filters ----

async function showFilters() {
  counting.abort();
  counting = new AbortController();
  const { signal } = counting;
  const index = indexOf(state.systems[0][0]);
  try {
    const facets = await countValues(index, state.chosen, state.long, signal);
    if (signal.aborted) return;
    showFacets(find("facets"), index, facets, state.chosen, state.long, choose, clear, lengthen);
  } catch (error) {
    const { message } = refused(error);
    if (message) find("facets").replaceChildren(element("p", { class: "problem" }, message), clearButton(clear));
  }
}

function choose(key, values) {
  state.chosen[key] = values;
  showFilters();
  search();
}

function clear() {
  state.chosen = {};
  showFilters();
  search();
}

function lengthen(key) {
  state.long.add(key);
  showFilters();
}

// ---- beginning ----

function showProblem(message) {
  find("problem").textContent = message;
  find("problem").hidden = message === "";
}

function askForKey() {
  find("unlock").hidden = false;
  find("key").focus();
}

/** Ask which indexes there are, and show the page as the address says. */
async function begin() {
  showProblem("");
  try {
    const all = (await ask("indexes")).indexes;
    indexes = all.filter((index) => !["vectors", "impacts"].includes(index.model)); // which encode no text
    models = (await ask("models")).models.map((model) => model.name);
    if (indexes.length === 0) throw new Refusal("The server has no index that can be searched by a text.", 0);
  } catch (error) {
    if (error.status === 401 && find("unlock").hidden) {
      askForKey();
      return;
    }
    showProblem(refused(error).message);
    return;
  }
  find("unlock").hidden = true;
  find("compare").parentElement.hidden = indexes.length + models.length < 2;
  readAddress();
  state.query = find("query").value = typed ?? state.query;
  typed = null;
  makeColumns();
  showFilters();
  search();
}

function searchTyped() {
  if (state.systems.length === 0) return; // begin will search for it
  clearTimeout(timer);
  state.query = find("query").value;
  state.k = STEP;
  typed = null;
  search();
}

find("query").addEventListener("input", () => {
  typed = find("query").value;
  clearTimeout(timer);
  timer = setTimeout(searchTyped, PAUSE);
});

find("search").addEventListener("submit", (event) => {
  event.preventDefault();
  searchTyped();
});

find("compare").addEventListener("change", () => {
  if (find("compare").checked) {
    const other = indexes.find((index) => index.name !== state.systems[0][0]) ?? indexes[0];
    state.systems = [state.systems[0], [other.name]];
    state.by = [state.by[0], indexes.length > 1 ? "" : models.find((name) => name !== state.by[0])];
  } else {
    state.systems = [state.systems[0]];
    state.by = [state.by[0]];
  }
  makeColumns();
  search();
});

find("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(find("key").value);
  find("key").value = "";
  begin();
});

window.addEventListener("hashchange", begin);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    find("query").focus();
    find("query").select();
    return;
  }
  const inBox = event.target === find("query");
  const moves = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowRight: [1, 0], ArrowLeft: [-1, 0] };
  const onTitle = event.target.matches("button.title");
  if (event.key in moves && (onTitle || (inBox && event.key === "ArrowDown"))) {
    event.preventDefault();
    moveFocus(event.target, ...moves[event.key]);
  }
});

/** Move from hit to hit, from column to column, and from the first hit to the search box. */
function moveFocus(from, columns, rows) {
  const titles = [...find("columns").children].map((column) => [...column.querySelectorAll("button.title")]);
  const column = titles.findIndex((list) => list.includes(from));
  if (column < 0) {
    titles.find((list) => list.length)?.[0].focus();
    return;
  }
  const row = titles[column].indexOf(from) + rows;
  if (row < 0) {
    find("query").focus();
    return;
  }
  const list = titles[column + columns];
  list?.[Math.min(row, list.length - 1)]?.focus();
}

if (matchMedia("(max-width: 48rem)").matches) find("filters").open = false;
begin();
