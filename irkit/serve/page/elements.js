// Make elements, and texts with marks. Content is only ever set as text: documents are untrusted.

/** Return an element with children: elements or strings. Attributes that are null or false are left out. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

/** Return a button that calls a function. */
export function button(label, attributes, act) {
  const made = element("button", { type: "button", ...attributes }, label);
  made.addEventListener("click", act);
  return made;
}

/** Return a score in at most 4 significant digits. */
export function formatScore(score) {
  return score === null ? "none" : Number(score.toPrecision(4)).toString();
}

/** Return the part of a text from start to end, in which spans are marked. Positions count code points. */
export function markSpans(text, spans, start = 0, end = Infinity) {
  const letters = Array.from(text);
  const parts = [];
  let position = start;
  for (const [first, last] of spans) {
    if (first < position || last > end) continue;
    parts.push(letters.slice(position, first).join(""));
    parts.push(element("mark", {}, letters.slice(first, last).join("")));
    position = last;
  }
  parts.push(letters.slice(position, end).join(""));
  return parts.filter((part) => part !== "");
}
