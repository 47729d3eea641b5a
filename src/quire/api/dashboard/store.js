// State between snapshots: recent steps, the history of the last hour, and totals of the last minute. Bounded.
import { median } from "./words.js";

export const MAX_STEPS = 400;
export const HOUR_S = 3600;
const RECENT_S = 6;
const MINUTE_S = 60;

export class Store {
  last = null;
  steps = [];
  history = [];
  /** The totals of the last minute: [at_s, totals]. */
  #totals = [];
  #isFirst = true;

  /** Begin a new stream: its snapshots do not continue the previous ones. */
  begin() {
    this.#isFirst = true;
  }

  take(snapshot) {
    if (this.#isFirst || snapshot.model !== this.last.model) this.#forget();
    this.#isFirst = false;
    const { at_s } = this.last = snapshot;
    const newest = this.steps.at(-1)?.step ?? -1;
    // A new worker numbers its steps from the beginning.
    if (snapshot.steps.some(({ step }) => step <= newest)) this.steps = this.steps.filter(({ at_s: then }) =>
      then < snapshot.steps[0].at_s);
    this.steps = [...this.steps, ...snapshot.steps].slice(-MAX_STEPS);
    const latest = this.history.at(-1)?.at_s ?? -Infinity;
    this.history = [...this.history, ...snapshot.history.filter((row) => row.at_s > latest)]
      .filter((row) => row.at_s > at_s - HOUR_S);
    if (this.#totals.length && this.#totals.at(-1)[1].num_output_tokens > snapshot.totals.num_output_tokens) {
      this.#totals = [];
    }
    this.#totals.push([at_s, snapshot.totals]);
    this.#totals = this.#totals.filter(([then]) => then > at_s - MINUTE_S);
  }

  #forget() {
    this.steps = [];
    this.history = [];
    this.#totals = [];
  }

  /** Output tokens per second in the last few seconds. */
  get outputRate() {
    const [now_s, now] = this.#totals.at(-1);
    const first = this.#totals.find(([then]) => then >= now_s - RECENT_S);
    const elapsed_s = now_s - first[0];
    if (elapsed_s >= 0.9) return (now.num_output_tokens - first[1].num_output_tokens) / elapsed_s;
    return this.history.at(-1)?.output_tokens_per_s ?? null;
  }

  /** The median TTFT of the last minute that has one. */
  get firstToken_s() {
    return this.#recent("ttft_p50_s");
  }

  /** The cached fraction of prompt tokens: in the last minute that has any, or since the beginning. */
  get hitRate() {
    const { num_prompt_tokens, num_cached_tokens } = this.last.totals;
    return this.#recent("hit_rate") ?? (num_prompt_tokens ? num_cached_tokens / num_prompt_tokens : null);
  }

  #recent(name) {
    const rows = this.history.filter((row) => row[name] != null);
    const end = rows.at(-1)?.at_s ?? 0;
    return median(rows.filter((row) => row.at_s > end - MINUTE_S).map((row) => row[name]));
  }
}
