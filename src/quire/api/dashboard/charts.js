// Charts with axes: lines over the last hour, and the engine's steps as stacked bars. Each describes in words what
// it shows, and the selected item.
import { Pointing, Sheet } from "./canvas.js";
import { css, filling } from "./palette.js";
import { ago, many, median, roundUp, short, span, whole } from "./words.js";

const LEFT = 54;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 22;
const MAX_GAP_S = 45;
const BAR = 6;

/** Draw the lines and figures of the value axis; return the function from values to y. */
export function axis(context, width, height, top, format) {
  const bottom = height - BOTTOM, scale = (value) => bottom - ((bottom - TOP) * value) / top;
  context.textAlign = "right";
  context.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(scale(part * top)) + 0.5;
    context.strokeStyle = css("line");
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width - RIGHT, y);
    context.stroke();
    context.fillStyle = css("soft");
    context.fillText(format(part * top), LEFT - 6, y);
  }
  return scale;
}

/** Lengths of the time axis: an hour, or less if the server started recently. */
const SPANS_S = [120, 300, 900, 1800, 3600];

/** One quantity over the last hour. */
export class LineChart {
  rows = [];
  now_s = 0;

  /** Shows `field` of the rows in this colour, formatted by `format`; `top` is the end of the axis, if it is fixed. */
  constructor(at, name, { field, colour, format, top = null }) {
    Object.assign(this, { field, colour, format, top, summary: at(`${name}-summary`) });
    this.sheet = new Sheet(at(`${name}-chart`), (context, width, height) => this.#draw(context, width, height));
    this.pointing = new Pointing(at(`${name}-chart`), at(`${name}-words`), {
      count: () => this.rows.length,
      find: (x) => this.#find(x),
      describe: (row) => this.#describe(this.rows[row]),
      first: () => this.rows.length - 1,
      point: () => this.sheet.redraw(),
    });
  }

  update(rows, now_s) {
    const isSame = rows.length === this.rows.length && rows.at(-1) === this.rows.at(-1);
    this.rows = rows;
    this.now_s = now_s;
    if (isSame) return;
    this.sheet.redraw();
    this.pointing.refresh();
    this.summary.textContent = this.#summaryText();
  }

  #summaryText() {
    const values = this.rows.map((row) => row[this.field]).filter((value) => value != null);
    if (!values.length) return "Nothing in the last hour.";
    const [now, middle, highest] = [values.at(-1), median(values), Math.max(...values)].map(this.format);
    return `Now ${now}, median ${middle}, highest ${highest}.`;
  }

  #describe(row) {
    return `${ago(this.now_s - row.at_s)}: ${row[this.field] == null ? "nothing" : this.format(row[this.field])}`;
  }

  get #span_s() {
    const age_s = this.now_s - (this.rows[0]?.at_s ?? this.now_s);
    return SPANS_S.find((span_s) => span_s >= age_s) ?? SPANS_S.at(-1);
  }

  #x(at_s, width) {
    return width - RIGHT - ((this.now_s - at_s) / this.#span_s) * (width - LEFT - RIGHT);
  }

  #find(x) {
    let nearest = -1, minDistance = 12;
    this.rows.forEach((row, at) => {
      const distance = Math.abs(this.#x(row.at_s, this.sheet.width) - x);
      if (distance < minDistance) [nearest, minDistance] = [at, distance];
    });
    return nearest;
  }

  #draw(context, width, height) {
    const values = this.rows.map((row) => row[this.field] ?? 0);
    const scale = axis(context, width, height, this.top ?? roundUp(Math.max(0, ...values)), this.format);
    for (const [part, align] of [[1, "left"], [0.5, "center"], [0, "right"]]) {
      if (part === 0.5 && width < 290) continue;
      const past_s = part * this.#span_s;
      context.textAlign = align;
      context.fillText(ago(past_s), this.#x(this.now_s - past_s, width), height - BOTTOM / 2 + 1);
    }
    this.#line(context, width, scale);
    const pointed = this.rows[this.pointing?.at];
    if (pointed) this.#cross(context, this.#x(pointed.at_s, width), height, scale, pointed);
  }

  #line(context, width, scale) {
    context.strokeStyle = css(this.colour);
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    let previous_s = -Infinity;
    for (const row of this.rows) {
      const value = row[this.field];
      if (value == null) continue;
      const x = this.#x(row.at_s, width), y = scale(value);
      if (row.at_s - previous_s > MAX_GAP_S) context.moveTo(x - 1, y);
      context.lineTo(x, y);
      previous_s = row.at_s;
    }
    context.stroke();
  }

  #cross(context, x, height, scale, row) {
    context.strokeStyle = css("ink");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, TOP);
    context.lineTo(Math.round(x) + 0.5, height - BOTTOM);
    context.stroke();
    context.fillStyle = css("ink");
    if (row[this.field] != null) context.fillRect(x - 2.5, scale(row[this.field]) - 2.5, 5, 5);
  }
}

/** The tokens that each of the last steps computed: output tokens below, prompt tokens above. */
export class StepChart {
  steps = [];

  constructor(at) {
    this.summary = at("steps-summary");
    this.sheet = new Sheet(at("steps-chart"), (context, width, height) => this.#draw(context, width, height));
    this.pointing = new Pointing(at("steps-chart"), at("steps-words"), {
      count: () => this.#shown.length,
      find: (x) => this.#find(x),
      describe: (step) => this.#describe(this.#shown[step]),
      first: () => this.#shown.length - 1,
      point: () => this.sheet.redraw(),
    });
  }

  get #shown() {
    return this.steps.slice(-Math.max(1, Math.floor(((this.sheet?.width ?? 0) - LEFT - RIGHT) / BAR)));
  }

  update(steps) {
    if (steps.at(-1) === this.steps.at(-1) && this.steps.length) return;
    this.steps = steps;
    this.sheet.redraw();
    this.pointing.refresh();
    const { rows, step } = steps.at(-1) ?? {};
    const duration = span(median(steps.map(({ ms }) => ms)) / 1000);
    this.summary.textContent = steps.length
      ? `Step ${whole(step)}: ${many(rows, "row")}. The median step took ${duration}.`
      : "No step yet: there was no request.";
  }

  #describe({ step, prompt_tokens, output_tokens, rows, ms }) {
    const tokens = `${whole(prompt_tokens)} prompt and ${whole(output_tokens)} output tokens`;
    return `Step ${whole(step)}: ${tokens}, ${many(rows, "row")}, ${span(ms / 1000)}`;
  }

  #left(at, shown, width) {
    return width - RIGHT - (shown - at) * BAR;
  }

  #find(x) {
    const shown = this.#shown.length, at = Math.floor((x - this.#left(0, shown, this.sheet.width)) / BAR);
    return at >= 0 && at < shown ? at : -1;
  }

  #draw(context, width, height) {
    const shown = this.#shown, sums = shown.map((step) => step.prompt_tokens + step.output_tokens);
    const scale = axis(context, width, height, roundUp(Math.max(1, ...sums)), short);
    const output = filling(context, "output", "solid"), prompt = filling(context, "prompt", "stripes");
    shown.forEach((step, at) => {
      const x = this.#left(at, shown.length, width), split = scale(step.output_tokens);
      context.fillStyle = output;
      context.fillRect(x, split, BAR - 1, scale(0) - split);
      context.fillStyle = prompt;
      context.fillRect(x, scale(sums[at]), BAR - 1, split - scale(sums[at]));
    });
    context.fillStyle = css("soft");
    context.textAlign = "right";
    context.fillText("now", width - RIGHT, height - BOTTOM / 2 + 1);
    context.textAlign = "left";
    if (shown.length) {
      const x = Math.min(this.#left(0, shown.length, width), width - 120);
      context.fillText(`step ${whole(shown[0].step)}`, x, height - BOTTOM / 2 + 1);
    }
    if (!(this.pointing?.at >= 0)) return;
    context.strokeStyle = css("ink");
    context.lineWidth = 1.5;
    context.strokeRect(this.#left(this.pointing.at, shown.length, width) - 1, TOP, BAR + 1, scale(0) - TOP);
  }
}

/** A line chart as small as a word, next to its figure. */
export class Spark {
  values = [];

  constructor(canvas) {
    this.sheet = new Sheet(canvas, (context, width, height) => this.#draw(context, width, height));
  }

  update(values) {
    if (values.length === this.values.length && values.at(-1) === this.values.at(-1)) return;
    this.values = values;
    this.sheet.redraw();
  }

  #draw(context, width, height) {
    const top = Math.max(...this.values.filter((value) => value != null), 0) || 1;
    context.strokeStyle = css("accent");
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    this.values.forEach((value, at) => {
      if (value != null) context.lineTo((at / (this.values.length - 1 || 1)) * width, height - 2 - (value / top) * (height - 4));
    });
    context.stroke();
  }
}
