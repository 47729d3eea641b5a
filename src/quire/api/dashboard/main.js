// The dashboard: passes snapshots to its views. What the server sends is drawn or written as text, never as markup.
import { BlockCard } from "./block.js";
import { LineChart, Spark, StepChart } from "./charts.js";
import { followTheme, filling } from "./palette.js";
import { PoolMap } from "./pool.js";
import { Store } from "./store.js";
import { Tables } from "./tables.js";
import { Timeline } from "./timeline.js";
import { TreeMap } from "./tree.js";
import { hasKey, setKey, takeKeyOfAddress, Watch } from "./watch.js";
import { NONE, percent, short, span, whole } from "./words.js";

const VERSION = 1;
const MAX_MEASURES = 100;
const SPARK_ROWS = 60;
const at = (id) => document.getElementById(id);
const write = (id, words) => { if (at(id).textContent !== words) at(id).textContent = words; };

const store = new Store();
let latest = null, isPaused = false, model = new URLSearchParams(location.search).get("model");

addEventListener("hashchange", () => begin((isTaken) => isTaken && listen()));
followTheme(at("theme"), () => redraw());

const block = new BlockCard(at, () => model, (chain) => pool.show(chain), (number) => { pool.point(number); block.choose(number); });
const pool = new PoolMap(at, (number) => block.choose(number));
const tree = new TreeMap(at, (number) => { pool.point(number); block.choose(number); });
const steps = new StepChart(at), timeline = new Timeline(at), tables = new Tables(at);
const charts = [
  new LineChart(at, "rate", { field: "output_tokens_per_s", colour: "output", format: short }),
  new LineChart(at, "prompts", { field: "prompt_tokens_per_s", colour: "prompt", format: short }),
  new LineChart(at, "first", { field: "ttft_p50_s", colour: "prompt", format: span }),
  new LineChart(at, "hits", { field: "hit_rate", colour: "output", format: percent, top: 1 }),
];
const sparks = Object.entries({ rate: "output_tokens_per_s", first: "ttft_p50_s", hits: "hit_rate" })
  .map(([name, field]) => [new Spark(at(`${name}-spark`)), field]);
const watch = new Watch(take, showState);

// -- snapshots --------------------------------------------------------------------------------------------------------

function take(snapshot) {
  if (snapshot.v !== VERSION) {
    watch.stop();
    return showState({ state: "lost", words: "the server is newer than this page; load it again" });
  }
  store.take(snapshot);
  // If several snapshots arrive before a frame, only the last one is drawn.
  if (!latest) requestAnimationFrame(draw);
  latest = snapshot;
}

function draw() {
  const began = performance.now();
  const { at_s, pool: memory, tree: branches, requests, fleet } = latest;
  at("gate").hidden = true;
  at("content").hidden = false;
  at("top").classList.remove("shut");
  figures(latest);
  choices(latest);
  // A gateway has no blocks, prefix tree and steps.
  at("grid").classList.toggle("of-fleet", Boolean(fleet));
  if (!fleet) {
    pool.update(memory);
    tree.update(branches);
    steps.update(store.steps);
  }
  timeline.update(requests, at_s);
  for (const chart of charts) chart.update(store.history, at_s);
  for (const [spark, field] of sparks) spark.update(store.history.slice(-SPARK_ROWS).map((row) => row[field]));
  tables.update(latest);
  latest = null;
  // For measurements of this page.
  if (performance.getEntriesByName("update").length >= MAX_MEASURES) performance.clearMeasures("update");
  performance.measure("update", { start: began, end: performance.now() });
}

function figures({ pool: { counts, num_blocks }, running, queue, totals, fleet, engine }) {
  const waiting = queue.reduce((sum, { num_requests }) => sum + num_requests, 0);
  const used = counts.used + counts.shared + counts.pinned + counts.computing;
  write("rate-figure", store.outputRate == null ? NONE : short(Math.round(store.outputRate)));
  write("first-figure", span(store.firstToken_s));
  write("hits-figure", percent(store.hitRate));
  write("running-figure", whole(running.length));
  write("waiting-figure", whole(waiting));
  write("used-figure", percent(num_blocks ? used / num_blocks : 0));
  write("used-note", `${whole(used)} held · ${fleet ? `of ${whole(num_blocks)} of all members` : `${whole(counts.cached)} cached`}`);
  const step = engine?.step_s > 1 ? ` · a step for ${span(engine.step_s)}` : "";
  const computed = engine ? ` · ${whole(engine.num_computed_tokens)} tokens computed${step}` : "";
  write("running-note", `${short(totals.num_requests)} so far, ${short(totals.num_preemptions)} preemptions${computed}`);
  at("used-bar").style.width = `${(100 * used) / (num_blocks || 1)}%`;
  at("cached-bar").style.width = `${(100 * counts.cached) / (num_blocks || 1)}%`;
}

function choices({ model: shown, models }) {
  // A busy model changes its state every few seconds; the list must not change while it is open.
  const shownAs = ({ name, state }) => ["ready", "busy"].includes(state) ? name : `${name} (${state})`;
  const known = models.map(shownAs).join("\u0001");
  const chooser = at("model");
  if (chooser.dataset.known !== known) {
    chooser.dataset.known = known;
    chooser.replaceChildren(...models.map((choice) => new Option(shownAs(choice), choice.name)));
  }
  if (chooser.value !== shown) chooser.value = shown;
}

// -- the connection ---------------------------------------------------------------------------------------------------

const SIGNS = { live: "●", connecting: "○", lost: "▲", paused: "‖", refused: "✕" };

function showState({ state, words = "", wait_s = 0, status = 0 }) {
  at("connection").dataset.state = state;
  at("top").classList.toggle("shut", state === "refused" || at("content").hidden);
  write("connection-sign", SIGNS[state]);
  const labels = { live: "Live", connecting: "Connecting …", paused: "Paused", lost: `Lost: ${words}` };
  // In an element of its own: screen readers must not read the countdown aloud.
  write("connection-wait", wait_s ? `retrying in ${wait_s} s` : "");
  write("connection-words", labels[state] ?? "Not let in");
  at("forget").hidden = !hasKey();
  if (state === "refused") refused(status, words);
}

function refused(status, words) {
  if (status === 404 && model) return choose(null);
  block.close();
  at("content").hidden = true;
  at("gate").hidden = false;
  for (const kind of [401, 403, 404]) at(`gate-${kind}`).hidden = kind !== status;
  at("gate-form").hidden = status === 404;
  write("gate-message", words);
  if (status !== 404) at("admin-key").focus();
}

function begin(then) {
  const refuse = ({ message }) => showState({ state: "refused", status: 401, words: message });
  takeKeyOfAddress().then(then, refuse);
}

function listen() {
  if (isPaused) return;
  store.begin();
  watch.start(model);
}

function choose(name) {
  model = name;
  const query = name ? `?model=${encodeURIComponent(name)}` : location.pathname;
  history.replaceState(null, "", query);
  block.close();
  listen();
}

function setPaused(value) {
  isPaused = value;
  at("pause").textContent = value ? "Go on" : "Pause";
  if (!value) return listen();
  watch.stop();
  return showState({ state: "paused" });
}

// -- controls ---------------------------------------------------------------------------------------------------------

at("pause").addEventListener("click", () => setPaused(!isPaused));
at("model").addEventListener("change", ({ target }) => { if (isPaused) setPaused(false); choose(target.value); });
at("gate-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("admin-key").value.trim());
  at("admin-key").value = "";
  listen();
});
at("forget").addEventListener("click", () => {
  setKey("");
  watch.stop();
  showState({ state: "refused", status: 401, words: "The key is forgotten." });
});
at("go-to").addEventListener("submit", (event) => {
  event.preventDefault();
  pool.point(at("block").valueAsNumber);
  block.choose(at("block").valueAsNumber);
});
// A hidden page needs no snapshots: the server need not make any for it.
document.addEventListener("visibilitychange", () => (document.hidden ? watch.stop() : listen()));

function redraw() {
  pool.redraw();
  for (const { sheet } of [tree, steps, timeline, ...charts, ...sparks.map(([spark]) => spark)]) sheet.redraw();
  for (const key of document.querySelectorAll("canvas[data-fill]")) {
    const context = key.getContext("2d"), [name, kind] = key.dataset.fill.split(" ");
    context.clearRect(0, 0, key.width, key.height);
    context.fillStyle = filling(context, name, kind);
    context.fillRect(0, 0, key.width, key.height);
  }
}

redraw();
begin(listen);
