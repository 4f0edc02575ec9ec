// The hits of one column: title, snippet, scores of the parts, and the difference to the other column.

import { ask, route } from "./api.js";
import { button, element, formatScore, markSpans } from "./elements.js";
import { scrollToBest, showExplanation } from "./explanation.js";

const VALUE = 200; // characters of a value of the metadata

/** Return what a part of a score is called: its kind, and the index if there are several. */
function label(index, several) {
  const kind = index.parts.join(", ");
  return several ? `${kind} (${index.name})` : kind;
}

/** Return what the score of a head is called: its name, and the index if there are several. */
function headLabel(head, index, several) {
  return several ? `${head} (${index.name})` : head;
}

/**
 * Return a list of hits; those with an id in `open` are explained. The main index comes first; `by` is the model
 * that ranked them again, or "".
 */
export function showHits(hits, query, indexes, by, difference, open) {
  return element("ol", { class: "hits" }, ...hits.map((hit, number) =>
    showHit(hit, number + 1, query, indexes, by, difference?.get(hit.id), open)));
}

function showHit(hit, rank, query, indexes, by, difference, open) {
  const body = element("div", { class: "explanation", hidden: true });
  const title = button("", { class: "title", dir: "auto", "aria-expanded": "false" }, () => {
    body.hidden = !body.hidden;
    title.setAttribute("aria-expanded", String(!body.hidden));
    if (!body.hasChildNodes()) explain(body, hit, query, indexes);
  });
  title.dataset.id = hit.id;
  title.append(...(hit.title ? markSpans(hit.title, hit.snippet.title) : [hit.id]));
  if (open.has(hit.id)) title.click();
  return element("li", { class: difference?.kind ?? null },
    element("article", {},
      element("h3", {}, element("span", { class: "rank" }, `${rank}`), title),
      difference ? element("p", { class: "change" }, difference.text) : null,
      element("p", { class: "snippet", dir: "auto" }, ...snippet(hit.snippet)),
      scores(hit, indexes, by),
      metadata(hit),
      body));
}

/** Return the best passage of the text, with the words of the query marked. */
function snippet({ text, start, end, length, marks }) {
  return [start > 0 ? "… " : "", ...markSpans(text, marks), end < length ? " …" : ""];
}

function scores(hit, indexes, by) {
  const several = indexes.length > 1;
  const of = (name) => (hit.parts ?? {})[name] ?? null;
  const parts = indexes.flatMap((index) => index.heads.length === 0
    ? [[label(index, several), of(index.name)]]
    : index.heads.map((head) => [headLabel(head, index, several), of(`${index.name}/${head}`)]));
  if (by) parts.unshift([by, hit.score]);
  else if (parts.length > 1) parts.unshift(["fused", hit.score]);
  else parts[0][1] = hit.score;
  return element("dl", { class: "scores" }, ...parts.map(([name, score]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, formatScore(score)))));
}

function metadata(hit) {
  const entries = [["id", hit.id], ...Object.entries(hit.metadata)];
  return element("dl", { class: "metadata" }, ...entries.map(([key, value]) => {
    const text = typeof value === "string" ? value : JSON.stringify(value);
    const shown = text.length > VALUE ? `${text.slice(0, VALUE)} …` : text;
    return element("div", {}, element("dt", {}, key), element("dd", {}, shown));
  }));
}

/** Ask each index of the column why it found the hit. */
async function explain(place, hit, query, indexes) {
  place.replaceChildren("Asking why …");
  const sections = await Promise.all(indexes.map(async (index) => {
    const name = label(index, indexes.length > 1);
    if (hit.parts && hit.parts[index.name] === null) {
      return element("p", {}, `${name}: this index lacks the document.`);
    }
    try {
      const answer = await ask(route(index.name, "explain"), { query, id: hit.id });
      const heads = Object.entries(answer.parts ?? {});
      if (heads.length === 0) return showExplanation(answer, name);
      return element("div", {}, ...heads.map(([head, part]) =>
        showExplanation(part, headLabel(head, index, indexes.length > 1))));
    } catch (error) {
      return element("p", { class: "problem" }, `${name}: ${error.message}`);
    }
  }));
  place.replaceChildren(...sections);
  place.querySelectorAll("section").forEach(scrollToBest);
}

/** Return by id how the rank of each hit differs from its rank in the other column, whose number is given. */
export function compareHits(hits, others, column) {
  const ranks = new Map(others.map((hit, number) => [hit.id, number]));
  return new Map(hits.map((hit, number) => {
    const other = ranks.get(hit.id);
    if (other === undefined) return [hit.id, { kind: "only", text: "only in this column" }];
    if (other === number) return [hit.id, { kind: "same", text: `same rank as in column ${column}` }];
    const places = Math.abs(other - number);
    const direction = other > number ? "▲" : "▼";
    const kind = other > number ? "higher" : "lower";
    const text = `${direction} ${places} ${kind} than in column ${column} (rank ${other + 1})`;
    return [hit.id, { kind, text }];
  }));
}
