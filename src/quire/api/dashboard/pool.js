// The pool as a map: one cell for each block, or for several, drawn as pixels; a lens for the cells at the pointer; and
// the selected block's chain (its ancestors in the prefix tree), drawn over the map.
import { Pointing, Sheet } from "./canvas.js";
import { blockOf, CellPicture, cellOf, decode, layout, LETTERS, lookOf, NAMES, referencesOf, sprite, STATES, stateOf } from "./cells.js";
import { colours, css, inkOn, mixed } from "./palette.js";
import { many, percent, whole } from "./words.js";

const COLOURS = { 0: "free", 1: "cached", 2: "used", 3: "shared-2", 16: "shared-4", 17: "shared-8", 18: "shared-16",
  4: "pinned", 5: "computing" };
const MAX_HEIGHT = 400;
const MAX_CELL = 22;
const LENS = { columns: 11, rows: 7, size: 22 };
const LITTLE_ENDIAN = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;

const packed = ([r, g, b]) =>
  LITTLE_ENDIAN ? ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0 : ((r << 24) | (g << 16) | (b << 8) | 255) >>> 0;

export class PoolMap {
  #cells = new Uint8Array(0);
  #pool = null;
  #picture = new CellPicture();
  #image = null;
  #shaped = "";
  #only = null;
  #chain = [];
  /** The cell that the lens shows while no cell is pointed at. */
  #seen = null;

  constructor(at, choose) {
    this.frame = at("pool-frame");
    this.empty = at("pool-empty");
    this.under = at("pool-under");
    this.map = at("pool-map").getContext("2d");
    this.over = at("pool-over").getContext("2d");
    this.lens = new Sheet(at("pool-lens"), (context) => this.#drawLens(context));
    this.legend = STATES.map((_, state) => this.#button(state));
    at("pool-legend").append(...this.legend.map(({ item }) => item));
    this.pointing = new Pointing(at("pool-over"), at("pool-words"), {
      count: () => this.#cells.length,
      find: (x, y) => this.#find(x, y),
      describe: (cell) => this.#describe(cell),
      step: (cell, key) => this.#step(cell, key),
      first: () => this.#seen ?? 0,
      point: (cell) => {
        if (cell >= 0) this.#seen = cell;
        this.#mark();
      },
      choose: (cell) => choose(blockOf(cell, this.#pool.blocks_per_cell)),
    });
    new ResizeObserver(() => this.redraw()).observe(this.frame);
  }

  update(pool) {
    this.#pool = pool;
    this.#cells = decode(pool.cells ?? "");
    const isThere = Boolean(this.#cells.length);
    this.frame.hidden = this.under.hidden = !isThere;
    this.empty.hidden = isThere;
    if (!(this.#seen < this.#cells.length)) this.#seen = null;
    this.#draw();
    this.#seen ??= this.#interesting();
    this.pointing.refresh();
    this.lens.redraw();
    this.legend.forEach(({ figure }, state) => {
      const count = pool.counts[STATES[state]];
      const words = `${whole(count)} · ${percent(pool.num_blocks ? count / pool.num_blocks : 0)}`;
      if (figure.textContent !== words) figure.textContent = words;
    });
  }

  /** Draw everything again, after a change of size or colours. */
  redraw() {
    this.#shaped = "";
    for (const { swatch, state } of this.legend) this.#paintSwatch(swatch, state);
    if (this.#pool) this.#draw();
    this.lens.redraw();
  }

  /** A cell near the first used block, which the lens shows initially. */
  #interesting() {
    const held = this.#cells.findIndex((cell) => stateOf(cell) > 1), { columns = 0 } = this.#picture;
    return held < 0 ? null : Math.min(held + 3 * columns + (LENS.columns >> 1), this.#cells.length - 1);
  }

  /** Highlight the blocks of a chain, from the root on; an empty chain ends the highlighting. */
  show(chain) {
    this.#chain = chain;
    this.#mark();
  }

  /** Point at a block. */
  point(block) {
    const cell = cellOf(block, this.#pool.blocks_per_cell);
    this.pointing.move(cell >= 0 && cell < this.#cells.length ? cell : -1);
  }

  // -- the picture ----------------------------------------------------------------------------------------------------

  #draw() {
    const width = Math.floor(this.frame.clientWidth * devicePixelRatio), count = this.#cells.length;
    if (!width || !count) return;
    const shape = `${width} ${count} ${devicePixelRatio} ${css("free")}`;
    if (shape !== this.#shaped) this.#shape(width, count);
    this.#shaped = shape;
    const changed = this.#picture.update(this.#cells, this.#only);
    if (changed) this.map.putImageData(this.#image, 0, 0, 0, changed.top, this.#picture.width, changed.height);
  }

  #shape(width, count) {
    const ratio = devicePixelRatio, picture = this.#picture, ground = packed(colours.card), sprites = [];
    const shape = layout(count, width, MAX_HEIGHT * ratio, Math.round(MAX_CELL * ratio));
    for (const [look, name] of Object.entries(COLOURS)) {
      sprites[Number(look)] = sprite(Number(look), shape.size, packed(colours[name]), ground);
      const pale = packed(mixed(colours[name], colours.card, 0.14));
      sprites[Number(look) + 8] = sprite(Number(look), shape.size, pale, ground);
    }
    picture.shape(count, shape, sprites, ground);
    this.#image = new ImageData(new Uint8ClampedArray(picture.pixels.buffer), picture.width, picture.height);
    for (const { canvas } of [this.map, this.over]) {
      canvas.width = picture.width;
      canvas.height = picture.height;
      canvas.style.width = `${picture.width / ratio}px`;
      canvas.style.height = `${picture.height / ratio}px`;
    }
    this.#mark();
  }

  /** Draw the overlay: the selected chain, and the cell that is pointed at. */
  #mark() {
    const { size, columns, width, height } = this.#picture, context = this.over;
    if (!size) return;
    const spot = (cell) => [(cell % columns) * size, Math.floor(cell / columns) * size];
    context.clearRect(0, 0, width, height);
    if (this.#chain.length) {
      context.fillStyle = css("card", 0.72);
      context.fillRect(0, 0, width, height);
      const cells = this.#chain.map((block) => cellOf(block, this.#pool.blocks_per_cell));
      context.strokeStyle = css("accent", 0.55);
      context.lineWidth = Math.max(1, size / 5);
      context.beginPath();
      for (const [x, y] of cells.map(spot)) context.lineTo(x + size / 2, y + size / 2);
      context.stroke();
      const side = Math.max(size - (size > 3 ? 1 : 0), 3);
      context.fillStyle = css("ink");
      for (const [x, y] of cells.map(spot)) context.fillRect(x, y, side, side);
    }
    if (this.pointing?.at >= 0) this.#frameCell(spot(this.pointing.at), size);
    this.lens?.redraw();
  }

  #frameCell([x, y], size) {
    const context = this.over, line = Math.max(1, Math.round(devicePixelRatio)), around = 2 * line;
    context.lineWidth = 4 * line;
    context.strokeStyle = css("card");
    context.strokeRect(x - around, y - around, size + 2 * around, size + 2 * around);
    context.lineWidth = 2 * line;
    context.strokeStyle = css("ink");
    context.strokeRect(x - around, y - around, size + 2 * around, size + 2 * around);
  }

  // -- pointing -------------------------------------------------------------------------------------------------------

  #find(x, y) {
    const { size, columns } = this.#picture, ratio = devicePixelRatio;
    const column = Math.floor((x * ratio) / size), row = Math.floor((y * ratio) / size);
    const cell = row * columns + column;
    return column >= 0 && column < columns && row >= 0 && cell < this.#cells.length ? cell : -1;
  }

  #step(cell, key) {
    const { columns } = this.#picture;
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -10 * columns,
      PageDown: 10 * columns }[key];
    return cell + by >= 0 && cell + by < this.#cells.length ? cell + by : cell;
  }

  #describe(cell) {
    const per = this.#pool.blocks_per_cell, first = blockOf(cell, per), state = stateOf(this.#cells[cell]);
    const last = Math.min(first + per - 1, this.#pool.num_blocks);
    const name = per === 1 ? `Block ${whole(first)}` : `Blocks ${whole(first)} to ${whole(last)}, the busiest of them`;
    const references = referencesOf(this.#cells[cell]);
    const held = references === 31 ? "31 or more hold it" : `${many(references, "reference")}`;
    return `${name}: ${NAMES[state]}${state > 1 ? `, ${held}` : ""}`;
  }

  #drawLens(context) {
    const { columns: across } = this.#picture, { columns, rows, size } = LENS, middle = this.#seen ?? -1;
    context.textAlign = "center";
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        const left = (middle % across) + column - (columns >> 1);
        const cell = middle + (row - (rows >> 1)) * across + column - (columns >> 1);
        const isThere = middle >= 0 && left >= 0 && left < across && cell >= 0 && cell < this.#cells.length;
        this.#drawUnderLens(context, isThere ? this.#cells[cell] : null, column * size, row * size);
      }
    }
    if (!(this.pointing?.at >= 0)) return;
    context.strokeStyle = css("ink");
    context.lineWidth = 2;
    context.strokeRect((columns >> 1) * size - 0.5, (rows >> 1) * size - 0.5, size, size);
  }

  #drawUnderLens(context, cell, x, y) {
    const side = LENS.size - 1;
    if (cell === null) {
      context.fillStyle = css("line", 0.4);
      context.fillRect(x, y, side, side);
      return;
    }
    const rgb = colours[COLOURS[lookOf(cell)]];
    context.fillStyle = css(rgb);
    context.fillRect(x, y, side, side);
    context.fillStyle = css(inkOn(rgb));
    context.fillText(LETTERS[stateOf(cell)] || String(referencesOf(cell)), x + side / 2, y + side / 2 + 0.5);
  }

  // -- the legend -----------------------------------------------------------------------------------------------------

  #button(state) {
    const item = document.createElement("button"), swatch = document.createElement("canvas");
    const name = document.createElement("span"), figure = document.createElement("span");
    item.type = "button";
    item.className = "legend-item";
    item.setAttribute("aria-pressed", "false");
    swatch.width = swatch.height = 16;
    swatch.setAttribute("aria-hidden", "true");
    name.textContent = NAMES[state];
    figure.className = "figure";
    item.append(swatch, name, figure);
    item.addEventListener("click", () => this.#showOnly(this.#only === state ? null : state));
    return { item, swatch, figure, state };
  }

  #showOnly(state) {
    this.#only = state;
    this.legend.forEach(({ item, state: own }) => item.setAttribute("aria-pressed", String(own === state)));
    if (this.#pool) this.#draw();
  }

  #paintSwatch(canvas, state) {
    const context = canvas.getContext("2d"), rgb = colours[COLOURS[state === 3 ? 16 : state]];
    context.fillStyle = css(rgb);
    context.fillRect(0, 0, 16, 16);
    context.fillStyle = css(inkOn(rgb));
    context.font = "bold 11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(LETTERS[state] || "2+", 8, 8.5);
  }
}
