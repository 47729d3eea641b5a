// What the page asks of the server that it came from. The key lives in this tab alone.

const KEY = "quire.key";

export class NeedsKey extends Error {}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = options.body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) throw new NeedsKey(key ? "This key is not known" : "A key is needed");
  if (!answer.ok) throw new Error(await reasonOf(answer));
  return answer;
}

async function reasonOf(answer) {
  const told = await answer.json().catch(() => null);
  return told?.error?.message ?? `the server answered ${answer.status}`;
}

/** The names of its models, and which of them are ready. */
export async function models() {
  return (await (await ask("/v1/models")).json()).data;
}

/** The next message: `hear` gets each delta; returns what the server said of it at the end. */
export async function answerTo(body, signal, hear) {
  const asked = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  const began = performance.now();
  const told = { usage: null, reason: null, firstAfter_ms: null, lastAfter_ms: null };
  const answer = await ask("/v1/chat/completions", { method: "POST", body: asked, signal });
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) told.usage = event.usage;
    for (const { delta, finish_reason } of event.choices ?? []) {
      told.reason = finish_reason ?? told.reason;
      if (!delta?.content && !delta?.reasoning && !delta?.tool_calls) continue;
      told.firstAfter_ms ??= performance.now() - began;
      told.lastAfter_ms = performance.now() - began;
      hear(delta);
    }
  }
  return told;
}

async function* events(stream) {
  let rest = "";
  for await (const piece of pieces(stream.pipeThrough(new TextDecoderStream()).getReader())) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data: ") ? line.slice(6).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Not every browser lets a stream be iterated itself.
async function* pieces(reader) {
  for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
}
