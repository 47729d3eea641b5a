// The page: its content and its controls. server.js sends requests, conversations.js stores conversations, and
// markdown.js converts text to nodes.
import { Conversations } from "./conversations.js";
import { make, nodesOf } from "./markdown.js";
import { answerTo, models, NeedsKey, setKey } from "./server.js";

const at = (id) => document.getElementById(id);
const notice = (words) => { at("notice").textContent = words; at("notice").hidden = !words; };
const store = new Conversations(notice);
const FIELDS = ["system", "temperature", "top_p", "max_tokens"];
const POLL_MS = 1000;
let generating = null;

// -- one message on the page ------------------------------------------------------------------------------------------

function show(message, index) {
  const isOwn = message.role === "user";
  const thought = make("div", { class: "thought" });
  const parts = { thoughts: folded("Thoughts", thought), text: make("div", { class: "text" }), calls: make("div") };
  const node = make("article", { class: message.role }, make("h2", {}, isOwn ? "You" : "Answer"));
  const bar = make("progress", { "aria-label": "Prompt computed" });
  const left = make("span");
  const reading = make("p", { class: "figures reading" }, bar, left);
  node.append(reading, parts.thoughts, parts.text, parts.calls);
  // Elements that the user has unfolded stay unfolded while more text arrives.
  const refresh = () => {
    reading.hidden = !message.progress;
    if (message.progress) [bar.max, bar.value] = [message.progress.total, message.progress.processed];
    left.textContent = message.progress ? progressOf(message.progress) : "";
    parts.thoughts.hidden = !message.reasoning;
    thought.textContent = message.reasoning ?? "";
    parts.text.replaceChildren(...(isOwn ? [message.content] : nodesOf(message.content)));
    (message.calls ?? []).forEach((call, at) => {
      if (!parts.calls.children[at]) parts.calls.append(folded(`Calls ${call.name}`, make("pre")));
      parts.calls.children[at].lastChild.textContent = call.arguments;
    });
  };
  refresh();
  if (message.error) node.append(make("p", { class: "figures failed" }, message.error));
  if (message.figures) node.append(make("p", { class: "figures" }, message.figures));
  if (!generating) node.append(tools(message, index));
  return { node, refresh };
}

const folded = (title, inside) => make("details", {}, make("summary", {}, title), inside);

function tools(message, index) {
  const button = (words, act) => {
    const node = make("button", { type: "button", class: "quiet small" }, words);
    node.addEventListener("click", act);
    return node;
  };
  const copy = button("Copy", () => navigator.clipboard.writeText(message.content));
  const again = message.role === "user" ? button("Edit", () => edit(index)) : button("Retry", () => retry(index));
  return make("div", { class: "tools" }, copy, again);
}

function edit(index) {
  at("question").value = store.current.messages[index].content;
  store.current.messages.splice(index);
  draw();
  at("question").focus();
}

function retry(index) {
  store.current.messages.splice(index);
  generate();
}

// -- everything on the page -------------------------------------------------------------------------------------------

function draw() {
  at("messages").replaceChildren(...store.current.messages.map((message, index) => show(message, index).node));
  at("conversations").replaceChildren(...store.all.map(entry));
  at("send").hidden = Boolean(generating);
  at("stop").hidden = !generating;
  for (const name of FIELDS) at(name).value = store.current.settings[name] ?? "";
  at("messages").scrollTop = at("messages").scrollHeight;
}

function entry(conversation) {
  const isCurrent = String(conversation === store.current);
  const open = make("button", { type: "button", class: "quiet small", "aria-current": isCurrent }, conversation.title);
  open.addEventListener("click", () => { stop(); store.choose(conversation.id); openList(false); draw(); });
  const label = `Delete ${conversation.title}`;
  const remove = make("button", { type: "button", class: "quiet small", "aria-label": label }, "×");
  remove.addEventListener("click", () => { stop(); store.remove(conversation.id); draw(); });
  return make("li", {}, open, remove);
}

function openList(isOpen) {
  at("list").classList.toggle("open", isOpen);
  at("open-list").setAttribute("aria-expanded", String(isOpen));
}

// -- generating -------------------------------------------------------------------------------------------------------

function bodyOf({ settings, messages }) {
  const sent = messages.map(({ role, content }) => ({ role, content }));
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const body = { model: at("model").value, messages: [...system, ...sent] };
  for (const name of FIELDS.slice(1)) if (settings[name]) body[name] = Number(settings[name]);
  return body;
}

function figuresOf({ usage, reason, firstAfter_ms: first, lastAfter_ms: last }) {
  if (!usage || first === null) return "";
  const count = usage.completion_tokens;
  const rate = last > first ? `${(((count - 1) * 1000) / (last - first)).toFixed(1)} tokens/s, ` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const end = reason === "length" ? "; it reached the token limit" : "";
  const prompt = `${cached} of ${usage.prompt_tokens} prompt tokens cached`;
  return `${count} tokens, ${rate}first after ${(first / 1000).toFixed(2)} s, ${prompt}${end}`;
}

function progressOf({ total, processed, left_ms: left }) {
  const rest = left ? `, about ${left < 90_000 ? `${Math.ceil(left / 1000)} s` : `${Math.round(left / 60_000)} min`} left` : "";
  return `${processed.toLocaleString("en")} of ${total.toLocaleString("en")} prompt tokens${rest}`;
}

function take(message, delta) {
  delete message.progress;
  message.content += delta.content ?? "";
  if (delta.reasoning) message.reasoning = (message.reasoning ?? "") + delta.reasoning;
  for (const part of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { name: "", arguments: "" });
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

async function generate() {
  const conversation = store.current;
  const body = bodyOf(conversation);
  const message = { role: "assistant", content: "" };
  const controller = (generating = new AbortController());
  conversation.messages.push(message);
  store.keep();
  draw();
  const shown = show(message, conversation.messages.length - 1);
  at("messages").lastChild.replaceWith(shown.node);
  const watching = setInterval(() => showLoading(body.model), POLL_MS);
  try {
    const result = await answerTo(body, controller.signal, (delta) => {
      clearInterval(watching);
      take(message, delta);
      follow(shown.refresh);
    }, (progress) => {
      clearInterval(watching);
      message.progress = progress;
      follow(shown.refresh);
    });
    message.figures = figuresOf(result);
  } catch (error) {
    await failed(error, message, conversation);
  }
  clearInterval(watching);
  delete message.progress;
  listModels();
  if (generating === controller) generating = null;
  store.keep();
  if (store.current === conversation) draw();
}

// Update once per frame, even if several tokens arrived. Scroll only if the user has not scrolled up.
let isDue = false;
function follow(change) {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const pane = at("messages");
    const isAtEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 40;
    change();
    if (isAtEnd) pane.scrollTop = pane.scrollHeight;
  });
}

async function failed(error, message, conversation) {
  if (error.name === "AbortError") { message.error = "You stopped this answer."; return; }
  if (!(error instanceof NeedsKey)) { message.error = `Error: ${error.message}`; return; }
  conversation.messages.pop();
  if (!(await requestKey(error.message))) return;
  if (store.current === conversation) setTimeout(generate);
}

function stop() {
  generating?.abort();
  generating = null;
}

function send(event) {
  event.preventDefault();
  const words = at("question").value;
  if (!words.trim() || generating) return;
  at("question").value = "";
  store.current.messages.push({ role: "user", content: words });
  generate();
}

// -- models and keys --------------------------------------------------------------------------------------------------

function requestKey(why) {
  const dialog = at("key-dialog");
  at("key-title").textContent = why;
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = at("key").value;
      at("key").value = "";
      if (key) setKey(key);
      resolve(Boolean(key));
    }, { once: true });
    dialog.showModal();
  });
}

const nameOf = ({ id, meta }) => (meta.state === "ready" ? id : `${id} (${meta.state})`);

// While a request waits for a model, show how much of the model is loaded.
async function showLoading(name) {
  const model = (await models().catch(() => [])).find(({ id }) => id === name);
  if (!generating || !model) return;
  const share = model.meta.loaded_share === null ? "" : `: ${Math.round(model.meta.loaded_share * 100)}%`;
  notice(model.meta.state === "ready" ? "" : `${name} is ${model.meta.state}${share}`);
}

async function listModels() {
  try {
    const available = await models();
    const chosen = at("model").value;
    at("model").replaceChildren(...available.map((model) => make("option", { value: model.id }, nameOf(model))));
    if (available.some(({ id }) => id === chosen)) at("model").value = chosen;
    notice("");
  } catch (error) {
    if (error instanceof NeedsKey && (await requestKey(error.message))) return listModels();
    const isLocked = error instanceof NeedsKey;
    notice(isLocked ? "A key is required: reload the page to enter one." : `Cannot list the models: ${error.message}`);
  }
}

at("composer").addEventListener("submit", send);
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
at("stop").addEventListener("click", stop);
at("new").addEventListener("click", () => { stop(); store.begin(); openList(false); draw(); at("question").focus(); });
at("forget").addEventListener("click", () => {
  if (!confirm("Delete all conversations kept in this browser?")) return;
  stop();
  store.removeAll();
  draw();
});
at("open-list").addEventListener("click", () => openList(!at("list").classList.contains("open")));
at("open-settings").addEventListener("click", () => at("settings").showModal());
at("settings").addEventListener("close", () => {
  for (const name of FIELDS) store.current.settings[name] = at(name).value;
  store.keep();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") openList(false); });
draw();
listModels();
