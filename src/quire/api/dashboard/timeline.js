// The timeline of the last requests: when each waited, was in prefill, generated output, and was preempted.
import { Pointing, Sheet } from "./canvas.js";
import { lanes } from "./lanes.js";
import { css, filling } from "./palette.js";
import { ago, many, span } from "./words.js";

const KINDS = {
  waiting: ["waiting", "dots"],
  prompt: ["prompt", "stripes"],
  answering: ["output", "solid"],
  preempted: ["preempted", "grid"],
};
const BOTTOM = 22;
const MAX_ROW_HEIGHT = 16;
/** Lengths of the shown window; the smallest that contains all requests is used. */
const WINDOWS_S = [15, 30, 60, 120, 300, 600, 1800];

export class Timeline {
  #requests = [];
  #now_s = 0;
  #seconds = WINDOWS_S[0];
  #found = lanes([], 0);

  constructor(at) {
    this.span = at("timeline-span");
    this.summary = at("timeline-summary");
    this.sheet = new Sheet(at("timeline-chart"), (context, width, height) => this.#draw(context, width, height));
    this.pointing = new Pointing(at("timeline-chart"), at("timeline-words"), {
      count: () => this.#found.placed.length,
      find: (x, y) => this.#find(x, y),
      describe: (place) => this.#describe(this.#found.placed[place].request),
      first: () => this.#found.placed.length - 1,
      point: () => this.sheet.redraw(),
    });
    this.span.addEventListener("change", () => { this.#place(); this.sheet.redraw(); this.pointing.refresh(); });
  }

  get #row() {
    return Math.min(MAX_ROW_HEIGHT, (this.sheet.height - BOTTOM) / Math.max(1, this.#found.numRows));
  }

  #place() {
    const first_s = Math.min(this.#now_s, ...this.#requests.map(({ segments }) => segments[0]?.[1] ?? Infinity));
    const all_s = WINDOWS_S.find((window_s) => window_s >= this.#now_s - first_s) ?? WINDOWS_S.at(-1);
    this.#seconds = Number(this.span.value) || all_s;
    this.#found = lanes(this.#requests, this.#now_s - this.#seconds);
  }

  #x(at_s) {
    return this.sheet.width * (1 - (this.#now_s - (at_s ?? this.#now_s)) / this.#seconds);
  }

  update(requests, now_s) {
    this.#requests = requests;
    this.#now_s = now_s;
    this.#place();
    this.sheet.redraw();
    this.pointing.refresh();
    const open = requests.filter(({ segments }) => segments.at(-1)?.[2] === null), paused = requests.filter(
      ({ segments }) => segments.some(([kind]) => kind === "preempted"),
    );
    const words = `${many(requests.length, "request")} of late, ${open.length} of them open, ${paused.length} preempted.`;
    this.summary.textContent = requests.length ? words : "No request yet.";
  }

  #find(x, y) {
    const row = Math.floor(y / this.#row);
    return this.#found.placed.findIndex(({ request: { segments }, row: own }) =>
      own === row && x >= this.#x(segments[0][1]) && x <= this.#x(segments.at(-1)[2]) + 1);
  }

  #describe({ request_id, tenant, class: priority, state, segments }) {
    const parts = segments.map(([kind, start_s, end_s]) => `${kind} ${span((end_s ?? this.#now_s) - start_s)}`);
    return `${request_id}, ${tenant}, ${priority}, ${state}: ${parts.join(", ")}`;
  }

  #draw(context, width, height) {
    const row = this.#row, high = row > 3 ? row - 1 : row;
    const fillings = Object.fromEntries(Object.entries(KINDS).map(([kind, fill]) => [kind, filling(context, ...fill)]));
    this.#axis(context, width, height);
    for (const { request: { segments }, row: at } of this.#found.placed) {
      for (const [kind, start_s, end_s] of segments) {
        const left = Math.max(0, this.#x(start_s)), right = this.#x(end_s);
        context.fillStyle = fillings[kind] ?? css("soft");
        if (right > 0) context.fillRect(left, at * row, Math.max(1, right - left - 0.5), high);
      }
    }
    const pointed = this.#found.placed[this.pointing?.at];
    if (!pointed) return;
    const { segments } = pointed.request, left = Math.max(1, this.#x(segments[0][1]));
    context.strokeStyle = css("ink");
    context.lineWidth = 2;
    context.strokeRect(left - 1, pointed.row * row - 1, Math.max(3, this.#x(segments.at(-1)[2]) - left), high + 2);
  }

  #axis(context, width, height) {
    const seconds = this.#seconds, bottom = height - BOTTOM;
    context.lineWidth = 1;
    for (const part of width < 420 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) {
      const x = Math.min(width - 0.5, Math.round(part * width) + 0.5);
      context.strokeStyle = css("line");
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, bottom);
      context.stroke();
      context.fillStyle = css("soft");
      context.textAlign = part === 0 ? "left" : part === 1 ? "right" : "center";
      context.fillText(part === 1 ? "now" : ago((1 - part) * seconds), x, height - BOTTOM / 2 + 1);
    }
  }
}
