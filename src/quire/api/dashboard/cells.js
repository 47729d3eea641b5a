// The cells of the pool as bytes and as pixels, without a page: what the map draws, and where.

export const STATES = ["free", "cached", "used", "shared", "pinned", "computing"];
/** As the page shows them. */
export const NAMES = ["free", "cached", "held by one", "shared", "pinned", "being computed"];
/** For a screen on which a cell is large enough, and for eyes that do not distinguish colours. */
export const LETTERS = ["·", "C", "1", "", "P", "N"];
const STATE = 7;
const DIM = 8;
const NOTHING = 255;

export const stateOf = (cell) => cell & STATE;
export const referencesOf = (cell) => cell >> 3;

/** Block 0 is never handed out: the first cell stands for block 1, or for as many from it on as a cell has. */
export const blockOf = (cell, perCell) => cell * perCell + 1;
export const cellOf = (block, perCell) => Math.floor((block - 1) / perCell);

export function decode(text) {
  const bytes = atob(text), cells = new Uint8Array(bytes.length);
  for (let at = 0; at < bytes.length; at += 1) cells[at] = bytes.charCodeAt(at);
  return cells;
}

/** How large a cell is, in pixels of the screen, and how many stand in a row, so that all fit. */
export function layout(count, width, mostHeight, mostSize) {
  let size = Math.floor(Math.sqrt((width * mostHeight) / Math.max(1, count)));
  size = Math.max(1, Math.min(size, mostSize, width));
  while (size > 1 && Math.ceil(count / Math.floor(width / size)) * size > mostHeight) size -= 1;
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, rows: Math.max(1, Math.ceil(count / columns)) };
}

/** What a cell looks like: its state, and of shared ones how many share it, in four steps. */
export function lookOf(cell) {
  const state = stateOf(cell);
  if (state !== 3) return state;
  const references = referencesOf(cell);
  return references < 4 ? 3 : 16 + (references < 8 ? 0 : references < 16 ? 1 : 2);
}

/** The part of a cell's pixels that is filled, by its look: patterns distinguish states without colour. */
function isFilled(look, x, y, inner) {
  if (inner < 3) return true;
  if (look === 0) return inner < 5 || x === 0 || y === 0 || x === inner - 1 || y === inner - 1;
  if (look === 4) return inner < 5 ? x === y || x + y === inner - 1 : (x + y) % 3 !== 0;
  if (look === 5) return (x + y) % 2 === 0;
  if (look === 1 && inner > 5) return y % 3 !== 2;
  return look < 3 || inner < 6 || x !== y || x === 0 || x === inner - 1;
}

/** The pixels of one cell of this look: `fill` and `ground` are 32-bit colours. */
export function sprite(look, size, fill, ground) {
  const inner = size > 3 ? size - 1 : size, pixels = new Uint32Array(size * size).fill(ground);
  for (let y = 0; y < inner; y += 1) {
    for (let x = 0; x < inner; x += 1) if (isFilled(look, x, y, inner)) pixels[y * size + x] = fill;
  }
  return pixels;
}

/** A picture of the cells, of which only what has changed is drawn again. */
export class CellPicture {
  #drawn = new Uint8Array(0);
  #sprites = [];

  /** `sprites[look]`, and at `look + 8` the same for cells that are dimmed at this moment. */
  shape(count, { size, columns, rows }, sprites, ground) {
    this.size = size;
    this.columns = columns;
    this.width = size * columns;
    this.height = size * rows;
    this.pixels = new Uint32Array(this.width * this.height).fill(ground);
    this.#drawn = new Uint8Array(count).fill(NOTHING);
    this.#sprites = sprites;
  }

  /** Draw what differs; the rows of pixels that changed, or null. `only` is a state whose cells are not dimmed. */
  update(cells, only = null) {
    let first = -1, last = -1;
    const drawn = this.#drawn;
    for (let at = 0; at < drawn.length; at += 1) {
      const look = lookOf(cells[at]) + (only === null || stateOf(cells[at]) === only ? 0 : DIM);
      if (drawn[at] === look) continue;
      drawn[at] = look;
      this.#put(at, this.#sprites[look]);
      if (first < 0) first = at;
      last = at;
    }
    if (first < 0) return null;
    const top = Math.floor(first / this.columns) * this.size;
    return { top, height: (Math.floor(last / this.columns) + 1) * this.size - top };
  }

  #put(at, pixels) {
    const { size, width } = this;
    let to = Math.floor(at / this.columns) * size * width + (at % this.columns) * size;
    for (let from = 0; from < pixels.length; from += size, to += width) {
      for (let x = 0; x < size; x += 1) this.pixels[to + x] = pixels[from + x];
    }
  }
}
