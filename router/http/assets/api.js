// The server's HTTP: streams of events with the tab's token, and errors in words.

const TOKEN = "pagoda-token";
const RETRIES = 10; // of a stream that was lost, without an event between them; a second apart, or as the server says

export function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

export function keepToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

export class ServerError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// The events of a stream, each {event, data, id}. A stream whose events have ids goes on behind the last one when its
// connection or the engine is lost. Throws ServerError.
export async function* events(path, options = {}) {
  let lastId = "";
  for (let tries = 0; ; tries += 1) {
    try {
      for await (const event of connected(path, { ...options, lastId })) {
        if (event.data.startsWith('{"error"') && JSON.parse(event.data).error.code === "resumable") throw lost();
        if (event.id) [lastId, tries] = [event.id, 0];
        yield event;
      }
      return;
    } catch (error) {
      if (!lastId || ![0, 503].includes(error.status) || tries === RETRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, 1e3 * (error.retryAfter ?? 1)));
    }
  }
}

async function* connected(path, { body, signal, lastId }) {
  const headers = {};
  if (lastId) headers["Last-Event-ID"] = lastId;
  if (token()) headers.Authorization = `Bearer ${token()}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer. Is it still running?");
  }
  if (!response.ok) throw refusal(response.status, await messageOf(response), response.headers.get("Retry-After"));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      yield* parts.map(parsed).filter((event) => event.data);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw lost();
  } finally {
    reader.cancel().catch(() => {});
  }
}

function lost() {
  return new ServerError(0, "The connection to the server was lost.");
}

function parsed(text) {
  const event = { event: "message", data: "", id: "" };
  for (const line of text.split("\n")) {
    const [, name, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (name === "event") event.event = value;
    else if (name === "data") event.data += value;
    else if (name === "id") event.id = value;
  }
  return event;
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "";
  }
}

// A refusal in words. `retryAfter` is the header, in seconds.
function refusal(status, message, retryAfter) {
  const seconds = retryAfter === null || retryAfter === undefined ? NaN : Number(retryAfter);
  const why = message ? ` The server says: ${message}.` : "";
  const wait = Number.isFinite(seconds) ? ` Try again in ${Math.max(1, Math.ceil(seconds))} s.` : "";
  const words =
    status === 401 ? (token() ? "The server refused your token." : "The server asks for a token.")
    : status === 403 ? `Your token does not allow this.${why}`
    : status === 429 ? `The server has too much to do.${wait || " Try again in a moment."}${why}`
    : status === 503 ? `The engine is not ready.${wait || " Try again in a moment."}`
    : status === 504 ? "The answer took longer than the server allows."
    : status >= 500 ? "The server failed to answer. Its log has the details."
    : message ? `The server refused this: ${message}.` : `The server refused this (${status}).`;
  return new ServerError(status, words, Number.isFinite(seconds) ? seconds : undefined);
}

// An error that came after the answer had begun, which then has no status.
export function lateRefusal({ message, type, code }) {
  if (code === "unavailable") return new ServerError(503, "The engine was lost while it answered. Try again in a moment.");
  const status = { rate_limit_error: 429, authentication_error: 401, permission_error: 403, timeout_error: 504 }[type];
  return refusal(status ?? 500, message);
}
