// Why a hit was found: the text with its heat, the best passage, and a table of the matches.

import { element, formatScore } from "./elements.js";

const SHOWN = 8; // rows of the table that are not folded away

const COLUMNS = {
  tokens: ["query", "document"],
  terms: ["term", "query × document"],
  expansion: ["term", "added to", "query × document"],
  passages: ["passage"],
};

const TITLES = {
  tokens: "Tokens that match",
  terms: "Terms that both texts have",
  expansion: "Expansion: terms that the model adds",
  passages: "Passages, each scored on its own",
};

/** Return a section that shows what the route `explain` answered of an index. */
export function showExplanation(answer, label) {
  const { view, part } = answer;
  const heading = element("h4", {}, `${label}: `, element("b", {}, formatScore(view.score)));
  if (view.matches.length === 0) {
    const reason = part === "terms" ? "Query and document share no term." : "The document has no text.";
    return element("section", { class: "why" }, heading, element("p", {}, reason));
  }
  const group = { tabindex: "0", role: "group", "aria-label": "Document" }; // which keys can scroll
  const text = element("div", { class: "heat", dir: "auto", ...group });
  const paint = (token) => text.replaceChildren(...paintSegments(view.document, token));
  paint(null);
  return element("section", { class: "why" }, heading,
    part === "passages" ? null : queryLine(view.query, paint), legend(), text, ...tables(view.matches, part));
}

/** Scroll a shown explanation of a long document to the best passage. */
export function scrollToBest(section) {
  const text = section.querySelector(".heat");
  const best = text?.querySelector(".best");
  if (best) text.scrollTop = best.offsetTop;
}

/** Return the query. Its words are buttons: pressed, a word shows only the heat of its own matches. */
function queryLine(segments, paint) {
  const words = segments.map((segment) => {
    if (segment.matches.length === 0) return segment.text;
    const word = element("button", { type: "button", "aria-pressed": "false", class: "word" }, segment.text);
    setHeat(word, segment.heat);
    word.addEventListener("click", () => {
      const press = word.getAttribute("aria-pressed") === "false";
      for (const other of line.querySelectorAll("button")) other.setAttribute("aria-pressed", "false");
      word.setAttribute("aria-pressed", String(press));
      paint(press ? segment.text : null);
    });
    return word;
  });
  const line = element("p", { class: "query" }, "Query: ", ...words);
  return line;
}

function legend() {
  const steps = [0, 0.25, 0.5, 0.75, 1].map((heat) => {
    const step = element("span", { class: "step" });
    setHeat(step, heat);
    return step;
  });
  return element("p", { class: "legend", "aria-hidden": "true" }, "share of the score ", ...steps,
    " highest · ", element("span", { class: "best" }, "best passage"));
}

/** Return the segments of a text; with a token of the query, only its matches have heat. */
function paintSegments(segments, token) {
  const same = (name) => name.trim() === token.trim();
  const heats = segments.map((segment) => {
    if (token === null) return segment.heat;
    return segment.matches.reduce((sum, [name, score]) => sum + (same(name) ? Math.max(0, score) : 0), 0);
  });
  const highest = Math.max(...heats, 0) || 1;
  return segments.map((segment, number) => {
    const heat = heats[number] / highest;
    const title = segment.matches.map(([name, score]) => `${name} ${formatScore(score)}`).join(", ");
    const attributes = { class: segment.best ? "best" : null, title: title || null };
    const made = element(heat > 0 ? "mark" : "span", attributes, segment.text);
    if (heat > 0) setHeat(made, heat);
    return made;
  });
}

function setHeat(target, heat) {
  target.style.setProperty("--heat", `${Math.round(100 * heat)}%`);
}

/** Return tables of the matches, best first; terms that a model has added to a text have their own table. */
function tables(matches, part) {
  const sorted = [...matches].sort((one, other) => other.score - one.score);
  if (part !== "terms") return [table(sorted, part)];
  const added = (match) => !match.in_query || !match.in_document;
  const [both, expansion] = [sorted.filter((match) => !added(match)), sorted.filter(added)];
  return [both.length ? table(both, "terms") : null, expansion.length ? table(expansion, "expansion") : null];
}

function table(matches, part) {
  const highest = Math.max(...matches.map((match) => match.score), 0) || 1;
  const names = COLUMNS[part];
  const head = element("tr", {}, ...[...names, "score"].map((name) => element("th", { scope: "col" }, name)));
  const rows = matches.map((match) => {
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    setHeat(bar, Math.max(0, match.score / highest));
    return element("tr", {}, ...cells(match, part).map((cell) => element("td", {}, cell)),
      element("td", { class: "number" }, formatScore(match.score), bar));
  });
  const make = (some, more = "") => element("table", {}, element("caption", {}, TITLES[part] + more),
    element("thead", {}, head.cloneNode(true)), element("tbody", {}, ...some));
  const first = make(rows.slice(0, SHOWN));
  if (rows.length <= SHOWN) return first;
  const rest = make(rows.slice(SHOWN), ", continued");
  const summary = element("summary", {}, `${rows.length - SHOWN} more`);
  return element("div", {}, first, element("details", {}, summary, rest));
}

function cells(match, part) {
  if (part === "passages") return [match.document];
  if (part === "tokens") return [match.query, match.document];
  const places = [match.in_query ? null : "query", match.in_document ? null : "document"].filter(Boolean);
  const term = match.query === match.document ? match.query : `${match.query} → ${match.document}`;
  const product = match.weights?.map(formatScore).join(" × ") ?? "";
  return part === "terms" ? [term, product] : [term, places.join(" and "), product];
}
