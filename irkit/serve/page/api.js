// Ask the server. The API key is kept in sessionStorage, so it ends with the tab.

const KEY = "irkit-key";
const LONGEST_PAUSE = 5; // seconds until a busy server is asked again

/** What the server refused; `status` is that of HTTP, or 0 if there was no answer. */
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Return the answer of a route: POST if there is a body, GET otherwise. A busy server is asked once more. */
export async function ask(route, body = null, signal = null, again = true) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(route, {
      method: body ? "POST" : "GET", body: body && JSON.stringify(body), headers, signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it still running?", 0);
  }
  const answer = await response.json().catch(() => null);
  if (response.ok && answer) return answer;
  if (response.status === 429 && again) {
    const seconds = Math.min(Number(response.headers.get("Retry-After")) || 1, LONGEST_PAUSE);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    signal?.throwIfAborted();
    return ask(route, body, signal, false);
  }
  const message = answer?.error ?? `The server answered ${response.status} without a message.`;
  throw new Refusal(message, response.status);
}

/** Return the path of a route of an index. */
export function route(name, verb) {
  return `indexes/${encodeURIComponent(name)}/${verb}`;
}
