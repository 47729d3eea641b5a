// What the page remembers between snapshots: steps, the last hour, and what has been counted lately. Bounded.
import { median } from "./words.js";

export const MOST_STEPS = 400;
export const HOUR_S = 3600;
const RECENT_S = 6;
const MINUTE_S = 60;

export class Store {
  last = null;
  steps = [];
  history = [];
  /** Counts of the last minute: [at_s, totals]. */
  #counted = [];
  #isFirst = true;

  /** A new stream, or another model: what follows does not continue what was. */
  begin() {
    this.#isFirst = true;
  }

  take(snapshot) {
    if (this.#isFirst || snapshot.model !== this.last.model) this.#forget();
    this.#isFirst = false;
    const { at_s } = this.last = snapshot;
    const newest = this.steps.at(-1)?.step ?? -1;
    // Steps of a new worker are counted from the beginning again.
    if (snapshot.steps.some(({ step }) => step <= newest)) this.steps = this.steps.filter(({ at_s: then }) =>
      then < snapshot.steps[0].at_s);
    this.steps = [...this.steps, ...snapshot.steps].slice(-MOST_STEPS);
    const latest = this.history.at(-1)?.at_s ?? -Infinity;
    this.history = [...this.history, ...snapshot.history.filter((row) => row.at_s > latest)]
      .filter((row) => row.at_s > at_s - HOUR_S);
    if (this.#counted.length && this.#counted.at(-1)[1].num_output_tokens > snapshot.totals.num_output_tokens) {
      this.#counted = [];
    }
    this.#counted.push([at_s, snapshot.totals]);
    this.#counted = this.#counted.filter(([then]) => then > at_s - MINUTE_S);
  }

  #forget() {
    this.steps = [];
    this.history = [];
    this.#counted = [];
  }

  /** Output tokens a second, of the last few seconds. */
  get outputRate() {
    const [now_s, now] = this.#counted.at(-1);
    const first = this.#counted.find(([then]) => then >= now_s - RECENT_S);
    const passed_s = now_s - first[0];
    if (passed_s >= 0.9) return (now.num_output_tokens - first[1].num_output_tokens) / passed_s;
    return this.history.at(-1)?.output_tokens_per_s ?? null;
  }

  /** The median first token of the last minute in which there was any. */
  get firstToken_s() {
    return this.#recent("ttft_p50_s");
  }

  /** The part of prompt tokens that was found: in the last minute in which there were any, or since the beginning. */
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
