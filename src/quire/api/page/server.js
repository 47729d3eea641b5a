// Requests to the page's own server. The key is stored for this tab only.

const KEY = "quire.key";

export class NeedsKey extends Error {}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = options.body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) throw new NeedsKey(key ? "Unknown key" : "A key is required");
  if (!answer.ok) throw new Error(await reasonOf(answer));
  return answer;
}

async function reasonOf(answer) {
  const body = await answer.json().catch(() => null);
  return body?.error?.message ?? `the server responded with ${answer.status}`;
}

/** The models of the server: names and states. */
export async function models() {
  return (await (await request("/v1/models")).json()).data;
}

/** Generate the next message. `onDelta` gets each delta, `onProgress` how much of the prompt is computed; the result
 *  has usage, finish reason and times. */
export async function answerTo(fields, signal, onDelta, onProgress) {
  const asStream = { stream: true, stream_options: { include_usage: true }, return_progress: true };
  const body = JSON.stringify({ ...fields, ...asStream });
  const began = performance.now();
  const result = { usage: null, reason: null, firstAfter_ms: null, lastAfter_ms: null };
  const answer = await request("/v1/chat/completions", { method: "POST", body, signal });
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) result.usage = event.usage;
    if (event.prompt_progress) onProgress(event.prompt_progress);
    for (const { delta, finish_reason } of event.choices ?? []) {
      result.reason = finish_reason ?? result.reason;
      if (!delta?.content && !delta?.reasoning && !delta?.tool_calls) continue;
      result.firstAfter_ms ??= performance.now() - began;
      result.lastAfter_ms = performance.now() - began;
      onDelta(delta);
    }
  }
  return result;
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

// Not every browser can iterate over a stream.
async function* pieces(reader) {
  for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
}
