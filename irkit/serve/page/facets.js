// The filters: for each key of the metadata its most frequent values with their counts, to be chosen.

import { ask, route } from "./api.js";
import { button, element } from "./elements.js";

const FEW = 8; // values of a key
const MANY = 100;
const KEYS = 16;

/** Return the filter of the API that asks for the chosen values: key -> list; null for none. */
export function makeFilter(chosen, without = null) {
  const keys = Object.keys(chosen).filter((key) => key !== without && chosen[key].length > 0);
  return keys.length ? Object.fromEntries(keys.map((key) => [key, chosen[key]])) : null;
}

/** Count the values of each key; a choice for a key does not narrow the key itself. */
export async function countValues(index, chosen, long, signal) {
  const count = async (keys, filter, k) => {
    if (keys.length === 0) return {};
    return (await ask(route(index.name, "facets"), { keys, filter, k }, signal)).facets;
  };
  const keys = index.keys.slice(0, KEYS);
  const plain = keys.filter((key) => !chosen[key]?.length && !long.has(key));
  const others = keys.filter((key) => !plain.includes(key));
  const counted = await Promise.all([
    count(plain, makeFilter(chosen), FEW + 1),
    ...others.map((key) => count([key], makeFilter(chosen, key), long.has(key) ? MANY : FEW + 1)),
  ]);
  return Object.assign({}, ...counted);
}

/** Return a button that removes all filters. */
export function clearButton(clear) {
  return button("Remove all filters", { class: "link" }, clear);
}

/** Show the values. `choose` gets a key, a value and whether it is chosen now; `lengthen` gets a key. */
export function showFacets(place, index, facets, chosen, long, choose, clear, lengthen) {
  const groups = index.keys.slice(0, KEYS).map((key) => {
    const selected = chosen[key] ?? [];
    const values = (facets[key] ?? []).slice(0, long.has(key) ? MANY : FEW);
    for (const value of selected) {
      if (!values.some((entry) => entry.value === value)) values.push({ value, count: 0 });
    }
    // a key with a value of its own for each document, such as a link, filters nothing
    const telling = selected.length > 0 || values.length <= 3 || values[0].count > 1;
    if (values.length === 0 || !telling) return null;
    const options = values.map(({ value, count }) => {
      const box = element("input", { type: "checkbox", checked: selected.includes(value) });
      box.addEventListener("change", () => choose(key, value, box.checked));
      box.dataset.facet = JSON.stringify([key, value]);
      const name = typeof value === "string" ? value : JSON.stringify(value);
      return element("li", {}, element("label", {}, box, element("span", { class: "value" }, name),
        element("span", { class: "count" }, count.toLocaleString("en"))));
    });
    const more = (facets[key] ?? []).length > FEW && !long.has(key)
      ? button(`More values of ${key}`, { class: "link" }, () => lengthen(key)) : null;
    return element("fieldset", {}, element("legend", {}, key), element("ul", {}, ...options), more);
  });
  const shown = groups.filter((group) => group !== null);
  if (Object.values(chosen).some((values) => values.length)) {
    shown.unshift(clearButton(clear));
  }
  const focused = document.activeElement?.dataset?.facet;
  const nothing = element("p", {}, "The documents have no metadata to filter by.");
  place.replaceChildren(...(shown.length ? shown : [nothing]));
  if (focused) [...place.querySelectorAll("input")].find((box) => box.dataset.facet === focused)?.focus();
}
