// The stream of snapshots: asks for it with the key of this tab, reads its events however they were cut, and asks again
// after growing waits when it breaks. The key lives in this tab alone.

const KEY = "quire.admin-key";
const WAITS_S = [0.5, 1, 2, 4, 8, 15];
/** Longer than a server that lives is ever silent. */
const SILENCE_MS = 15_000;
const MOST_CHARACTERS = 16_000_000;

export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

/** A key that came behind the # of the address: kept in this tab, and taken out of the address. */
export function takeKeyOfAddress() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return false;
  setKey(key);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

/** The server answered, and not with what was asked for. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** One answer of the server that this page came from. */
export async function ask(path, signal) {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(path, { signal, cache: "no-store", headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told?.error?.message ?? `the server answered ${answer.status}`);
}

/** Takes pieces of a stream of events; gives the name and data of each event that is whole. */
export class EventReader {
  #rest = "";
  #name = "";
  #data = [];

  read(piece) {
    const text = this.#rest + piece;
    if (text.length > MOST_CHARACTERS) throw new Error("an event of the stream is too long");
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

/** How long to wait before asking again, after so many failures; not all pages of a server at once. */
export const waitAfter = (failures, random = Math.random) =>
  WAITS_S[Math.min(failures, WAITS_S.length - 1)] * (0.75 + random() / 2);

/** Listens until it is told to stop. `hear` gets snapshots; `tell` gets what the connection is like. */
export class Watch {
  #hear;
  #tell;
  #stopping = null;

  constructor(hear, tell) {
    this.#hear = hear;
    this.#tell = tell;
  }

  /** To one model, or to whichever the server thinks of first. Whatever it listened to before is left. */
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
      this.#tell({ state: "connecting" });
      const reason = await this.#listen(path, stopped, () => { failures = 0; }).catch((error) => error);
      if (stopped.aborted) return;
      if (reason instanceof Refused && [401, 403, 404].includes(reason.status)) {
        this.#tell({ state: "refused", status: reason.status, words: reason.message });
        return;
      }
      await this.#wait(waitAfter(failures), reason.message, stopped);
    }
  }

  async #listen(path, stopped, succeed) {
    const silent = new AbortController();
    let timer = setTimeout(() => silent.abort(new Error("the server is silent")), SILENCE_MS);
    try {
      const answer = await ask(path, AbortSignal.any([stopped, silent.signal]));
      const events = new EventReader(), reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let read = await reader.read(); !read.done; read = await reader.read()) {
        clearTimeout(timer);
        timer = setTimeout(() => silent.abort(new Error("the server is silent")), SILENCE_MS);
        const snapshots = events.read(read.value).filter((event) => event.name === "snapshot");
        if (!snapshots.length || stopped.aborted) continue;
        succeed();
        for (const { data } of snapshots) this.#hear(JSON.parse(data));
        if (!stopped.aborted) this.#tell({ state: "live" });
      }
    } finally {
      clearTimeout(timer);
    }
    return new Error("the stream ended");
  }

  async #wait(seconds, words, stopped) {
    const end = performance.now() + 1000 * seconds;
    for (let left = seconds; left > 0 && !stopped.aborted; left = (end - performance.now()) / 1000) {
      this.#tell({ state: "lost", words, wait_s: Math.ceil(left) });
      await new Promise((resolve) => { setTimeout(resolve, 1000 * Math.min(left, 1)); });
    }
  }
}
