// The last requests as rows over time: how long each waited, read its prompt, answered, and stood aside.
import { Pointing, Sheet } from "./canvas.js";
import { css, filling } from "./palette.js";
import { ago, many, span } from "./words.js";

const KINDS = {
  waiting: ["waiting", "dots"],
  prompt: ["prompt", "stripes"],
  answering: ["output", "solid"],
  preempted: ["preempted", "grid"],
};
const BOTTOM = 22;
const MOST_ROW = 16;
const LEAST_ROW = 4;

export class Timeline {
  #requests = [];
  #now_s = 0;

  constructor(at) {
    this.span = at("timeline-span");
    this.summary = at("timeline-summary");
    this.sheet = new Sheet(at("timeline-chart"), (context, width, height) => this.#draw(context, width, height));
    this.pointing = new Pointing(at("timeline-chart"), at("timeline-words"), {
      count: () => this.#shown.length,
      find: (_, y) => this.#find(y),
      describe: (row) => this.#describe(this.#shown[row]),
      first: () => this.#shown.length - 1,
      point: () => this.sheet.redraw(),
    });
    this.span.addEventListener("change", () => this.sheet.redraw());
  }

  get #from_s() {
    return this.#now_s - Number(this.span.value);
  }

  /** Those of which there is anything in the window: the newest, as many as have room. */
  get #shown() {
    const from_s = this.#from_s, room = Math.floor(((this.sheet?.height ?? 0) - BOTTOM) / LEAST_ROW);
    const seen = this.#requests.filter(({ segments }) => segments.some(([, , end_s]) => (end_s ?? Infinity) > from_s));
    return seen.slice(-Math.max(1, room));
  }

  get #row() {
    return Math.min(MOST_ROW, (this.sheet.height - BOTTOM) / Math.max(1, this.#shown.length));
  }

  update(requests, now_s) {
    const began = ({ segments }) => segments[0]?.[1] ?? 0;
    this.#requests = [...requests].sort((one, other) => began(one) - began(other));
    this.#now_s = now_s;
    this.sheet.redraw();
    this.pointing.refresh();
    const open = requests.filter(({ segments }) => segments.at(-1)?.[2] === null), aside = requests.filter(
      ({ segments }) => segments.some(([kind]) => kind === "preempted"),
    );
    const words = `${many(requests.length, "request")} of late, ${open.length} of them open, ${aside.length} preempted.`;
    this.summary.textContent = requests.length ? words : "No request yet.";
  }

  #find(y) {
    const at = Math.floor(y / this.#row);
    return at >= 0 && at < this.#shown.length ? at : -1;
  }

  #describe({ request_id, tenant, class: priority, state, segments }) {
    const parts = segments.map(([kind, start_s, end_s]) => `${kind} ${span((end_s ?? this.#now_s) - start_s)}`);
    return `${request_id}, ${tenant}, ${priority}, ${state}: ${parts.join(", ")}`;
  }

  #draw(context, width, height) {
    const from_s = this.#from_s, scale = width / Number(this.span.value), row = this.#row, shown = this.#shown;
    const fillings = Object.fromEntries(Object.entries(KINDS).map(([kind, how]) => [kind, filling(context, ...how)]));
    this.#axis(context, width, height);
    shown.forEach(({ segments }, at) => {
      for (const [kind, start_s, end_s] of segments) {
        const left = Math.max(0, (start_s - from_s) * scale), right = ((end_s ?? this.#now_s) - from_s) * scale;
        context.fillStyle = fillings[kind] ?? css("soft");
        if (right > 0) context.fillRect(left, at * row, Math.max(1, right - left), Math.max(1, row - 1));
      }
    });
    if (!(this.pointing?.at >= 0)) return;
    context.strokeStyle = css("ink");
    context.lineWidth = 1.5;
    context.strokeRect(1, this.pointing.at * row - 1, width - 2, row + 1);
  }

  #axis(context, width, height) {
    const seconds = Number(this.span.value), bottom = height - BOTTOM;
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
