// The filters: for each key of the metadata its most frequent values with their counts, or a range of numbers.

import { ask, route } from "./api.js";
import { button, element } from "./elements.js";

const FEW = 8; // values of a key
const MANY = 100;
const KEYS = 16;

/** Return whether something of a key is chosen: a list of values, or an object with the ends of a range. */
const isChosen = (choice) => Object.keys(choice ?? {}).length > 0;

/** Return the filter of the API that asks for what is chosen: key -> values or range; null for none. */
export function makeFilter(chosen, without = null) {
  const keys = Object.keys(chosen).filter((key) => key !== without && isChosen(chosen[key]));
  return keys.length ? Object.fromEntries(keys.map((key) => [key, chosen[key]])) : null;
}

/** Count the values of each key; a choice for a key does not narrow the key itself. */
export async function countValues(index, chosen, long, signal) {
  const count = async (keys, filter, k) => {
    if (keys.length === 0) return {};
    return (await ask(route(index.name, "facets"), { keys, filter, k }, signal)).facets;
  };
  const keys = index.keys.slice(0, KEYS);
  const plain = keys.filter((key) => !isChosen(chosen[key]) && !long.has(key));
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

/** Return two fields for the least and the greatest number of a key. */
function rangeFields(key, range, choose) {
  const fields = [[">=", "from"], ["<=", "to"]].map(([comparison, name]) => {
    const field = element("input", { type: "number", step: "any", value: range[comparison] ?? null });
    field.dataset.facet = JSON.stringify([key, comparison]);
    field.addEventListener("change", () => {
      const { [comparison]: _, ...rest } = range;
      const number = field.valueAsNumber;
      choose(key, Number.isNaN(number) ? rest : { ...rest, [comparison]: number });
    });
    return element("label", {}, `${name} `, field);
  });
  return element("div", { class: "range" }, ...fields);
}

/** Show the filters. `choose` gets a key, and the values or the range chosen now; `lengthen` gets a key. */
export function showFacets(place, index, facets, chosen, long, choose, clear, lengthen) {
  const groups = index.keys.slice(0, KEYS).map((key) => {
    const selected = Array.isArray(chosen[key]) ? chosen[key] : [];
    const range = Array.isArray(chosen[key]) ? {} : chosen[key] ?? {};
    const values = (facets[key] ?? []).slice(0, long.has(key) ? MANY : FEW);
    for (const value of selected) {
      if (!values.some((entry) => entry.value === value)) values.push({ value, count: 0 });
    }
    const areNumbers = values.length > 1 && values.every(({ value }) => typeof value === "number");
    const numbers = isChosen(range) || areNumbers;
    // a key with a value of its own for each document, such as a link, filters nothing
    const telling = selected.length > 0 || values.length <= 3 || values[0].count > 1;
    if (!numbers && (values.length === 0 || !telling)) return null;
    const options = (telling ? values : []).map(({ value, count }) => {
      const box = element("input", { type: "checkbox", checked: selected.includes(value) });
      box.addEventListener("change", () => {
        const rest = selected.filter((other) => other !== value);
        choose(key, box.checked ? [...rest, value] : rest);
      });
      box.dataset.facet = JSON.stringify([key, value]);
      const name = typeof value === "string" ? value : JSON.stringify(value);
      return element("li", {}, element("label", {}, box, element("span", { class: "value" }, name),
        element("span", { class: "count" }, count.toLocaleString("en"))));
    });
    const more = telling && (facets[key] ?? []).length > FEW && !long.has(key)
      ? button(`More values of ${key}`, { class: "link" }, () => lengthen(key)) : null;
    return element("fieldset", {}, element("legend", {}, key), numbers ? rangeFields(key, range, choose) : null,
      options.length ? element("ul", {}, ...options) : null, more);
  });
  const shown = groups.filter((group) => group !== null);
  if (Object.values(chosen).some(isChosen)) {
    shown.unshift(clearButton(clear));
  }
  const focused = document.activeElement?.dataset?.facet;
  const nothing = element("p", {}, "The documents have no metadata to filter by.");
  place.replaceChildren(...(shown.length ? shown : [nothing]));
  if (focused) [...place.querySelectorAll("input")].find((box) => box.dataset.facet === focused)?.focus();
}
