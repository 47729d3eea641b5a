// Canvases with the screen's resolution, in which the pointer or the arrow keys select items.

export const FONT = "12px system-ui, sans-serif";

/** A canvas with the size of its box. `draw` gets its context, in CSS pixels, whenever it must be drawn. */
export class Sheet {
  width = 0;
  height = 0;
  ratio = 1;

  constructor(canvas, draw) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.draw = draw;
    new ResizeObserver(() => this.#fit()).observe(canvas);
  }

  #fit() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const ratio = devicePixelRatio;
    if (width === this.width && height === this.height && ratio === this.ratio) return;
    Object.assign(this, { width, height, ratio });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.redraw();
  }

  redraw() {
    if (!this.width || !this.height) return;
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    this.context.font = FONT;
    this.context.textBaseline = "middle";
    this.draw(this.context, this.width, this.height);
  }
}

/**
 * Lets the pointer or keys select an item on a canvas. `things` has `count()`, `find(x, y)` and `describe(index)`, and
 * optionally `step(index, key)` for arrow keys, `point(index)` to show the item, `choose(index)` for Enter or a click.
 */
export class Pointing {
  at = -1;
  #canvas;
  #things;
  #words;

  constructor(canvas, words, things) {
    this.#canvas = canvas;
    this.#words = words;
    this.#things = things;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "slider");
    canvas.setAttribute("aria-valuemin", "0");
    canvas.addEventListener("pointermove", (event) => this.#move(this.#under(event)));
    canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) this.#move(-1); });
    canvas.addEventListener("blur", () => this.#move(-1));
    canvas.addEventListener("click", (event) => {
      this.#move(this.#under(event));
      if (this.at >= 0) things.choose?.(this.at);
    });
    canvas.addEventListener("keydown", (event) => this.#press(event));
    this.refresh();
  }

  #under(event) {
    const { left, top } = this.#canvas.getBoundingClientRect();
    return this.#things.find(event.clientX - left, event.clientY - top);
  }

  #press(event) {
    const count = this.#things.count();
    if (!count || event.ctrlKey || event.altKey || event.metaKey) return;
    const ends = { Home: 0, End: count - 1 };
    const arrows = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "PageUp", "PageDown"];
    if ((event.key === "Enter" || event.key === " ") && this.at >= 0) this.#things.choose?.(this.at);
    else if (event.key === "Escape") this.#move(-1);
    else if (event.key in ends) this.#move(ends[event.key]);
    else if (arrows.includes(event.key)) this.#move(this.at < 0 ? this.#first(count) : this.#stepped(event.key, count));
    else return;
    event.preventDefault();
  }

  #first(count) {
    return this.#things.first?.() ?? Math.min(0, count - 1);
  }

  #stepped(key, count) {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, PageUp: -10, PageDown: 10 }[key];
    const next = this.#things.step ? this.#things.step(this.at, key) : this.at + by;
    return Math.max(0, Math.min(count - 1, next));
  }

  /** Select an item, or none with -1. */
  move(at) {
    this.#move(at);
  }

  #move(at) {
    if (at === this.at) return;
    this.at = at;
    this.refresh();
    this.#things.point?.(at);
  }

  /** Update the description: the selected item may have changed. */
  refresh() {
    const count = this.#things.count();
    if (this.at >= count) this.at = -1;
    const text = this.at < 0 ? "" : this.#things.describe(this.at);
    if (this.#words.textContent !== text) this.#words.textContent = text;
    this.#canvas.setAttribute("aria-valuemax", String(Math.max(0, count - 1)));
    this.#canvas.setAttribute("aria-valuenow", String(Math.max(0, this.at)));
    this.#canvas.setAttribute("aria-valuetext", text || "nothing is pointed at; use the arrow keys");
  }
}
