// The stream of snapshots: requested with the key of this tab, read in pieces of any size, and requested again after
// increasing delays when it breaks. The key is stored for this tab only.

const KEY = "quire.admin-key";
const WAITS_S = [0.5, 1, 2, 4, 8, 15];
/** Longer than the interval of events of any running server. */
const SILENCE_MS = 15_000;
const MAX_CHARACTERS = 16_000_000;

export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

/** Move the key after the # of the address to this tab's storage; a token is first exchanged for a key, once. */
export async function takeKeyOfAddress() {
  const parts = new URLSearchParams(location.hash.slice(1)), token = parts.get("token");
  if (token === null && !parts.has("key")) return false;
  history.replaceState(null, "", location.pathname + location.search);
  setKey(token === null ? parts.get("key") : token);
  if (token === null) return true;
  try {
    setKey((await (await request("/v1/admin/session", undefined, "POST")).json()).key);
  } catch (error) {
    setKey("");
    throw error;
  }
  return true;
}

/** A response of the server with an error status. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request to the page's own server. */
export async function request(path, signal, method = "GET") {
  const key = sessionStorage.getItem(KEY), headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { method, signal, cache: "no-store", headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refused(answer.status, body?.error?.message ?? `the server responded with ${answer.status}`);
}

/** Parses pieces of an event stream; returns name and data of each complete event. */
export class EventReader {
  #rest = "";
  #name = "";
  #data = [];

  read(piece) {
    const text = this.#rest + piece;
    if (text.length > MAX_CHARACTERS) throw new Error("an event of the stream is too long");
    const lines = text.split("\n");
    this.#rest = lines.pop();
    return lines.map((line) => this.#take(line.endsWith("\r") ? line.slice(0, -1) : line)).filter(Boolean);
  }

  #take(line) {
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (line && field === "event") this.#name = value;
    if (line && field === "data") this.#data.push(value);
    if (line) return null;
    const event = this.#data.length ? { name: this.#name || "message", data: this.#data.join("\n") } : null;
    this.#name = "";
    this.#data = [];
    return event;
  }
}

/** Seconds to wait after a number of failures; random, so that not all pages of a server retry at once. */
export const waitAfter = (failures, random = Math.random) =>
  WAITS_S[Math.min(failures, WAITS_S.length - 1)] * (0.75 + random() / 2);

/** Runs until it is stopped. `onSnapshot` gets snapshots; `onState` gets the state of the connection. */
export class Watch {
  #onSnapshot;
  #onState;
  #stopping = null;

  constructor(onSnapshot, onState) {
    this.#onSnapshot = onSnapshot;
    this.#onState = onState;
  }

  /** Follow one model, or the server's first. The previous stream is stopped. */
  start(model) {
    this.stop();
    this.#stopping = new AbortController();
    this.#run(model ? `/v1/admin/watch?model=${encodeURIComponent(model)}` : "/v1/admin/watch", this.#stopping.signal);
  }

  stop() {
    this.#stopping?.abort();
    this.#stopping = null;
  }

  async #run(path, stopped) {
    for (let failures = 0; !stopped.aborted; failures += 1) {
      this.#onState({ state: "connecting" });
      const reason = await this.#listen(path, stopped, () => { failures = 0; }).catch((error) => error);
      if (stopped.aborted) return;
      if (reason instanceof Refused && [401, 403, 404].includes(reason.status)) {
        this.#onState({ state: "refused", status: reason.status, words: reason.message });
        return;
      }
      await this.#wait(waitAfter(failures), reason.message, stopped);
    }
  }

  async #listen(path, stopped, succeed) {
    const silent = new AbortController();
    let timer = setTimeout(() => silent.abort(new Error("the server is silent")), SILENCE_MS);
    try {
      const answer = await request(path, AbortSignal.any([stopped, silent.signal]));
      const events = new EventReader(), reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let read = await reader.read(); !read.done; read = await reader.read()) {
        clearTimeout(timer);
        timer = setTimeout(() => silent.abort(new Error("the server is silent")), SILENCE_MS);
        const snapshots = events.read(read.value).filter((event) => event.name === "snapshot");
        if (!snapshots.length || stopped.aborted) continue;
        succeed();
        for (const { data } of snapshots) this.#onSnapshot(JSON.parse(data));
        if (!stopped.aborted) this.#onState({ state: "live" });
      }
    } finally {
      clearTimeout(timer);
    }
    return new Error("the stream ended");
  }

  async #wait(seconds, words, stopped) {
    const end = performance.now() + 1000 * seconds;
    for (let left = seconds; left > 0 && !stopped.aborted; left = (end - performance.now()) / 1000) {
      this.#onState({ state: "lost", words, wait_s: Math.ceil(left) });
      await new Promise((resolve) => { setTimeout(resolve, 1000 * Math.min(left, 1)); });
    }
  }
}
