// The cells of the pool map, each for one or more blocks, as bytes and as pixels, without access to the page.

export const STATES = ["free", "cached", "used", "shared", "pinned", "computing"];
/** The names of the states on the page. */
export const NAMES = ["free", "cached", "held by one", "shared", "pinned", "being computed"];
/** A letter for each state, shown if cells are large enough: not all users distinguish the colours. */
export const LETTERS = ["·", "C", "1", "", "P", "N"];
const STATE = 7;
const DIM = 8;
const NOTHING = 255;

export const stateOf = (cell) => cell & STATE;
export const referencesOf = (cell) => cell >> 3;

/** Block 0 is never allocated: the first cell is block 1, or the first `perCell` blocks from block 1 on. */
export const blockOf = (cell, perCell) => cell * perCell + 1;
export const cellOf = (block, perCell) => Math.floor((block - 1) / perCell);

export function decode(text) {
  const bytes = atob(text), cells = new Uint8Array(bytes.length);
  for (let index = 0; index < bytes.length; index += 1) cells[index] = bytes.charCodeAt(index);
  return cells;
}

/** The size of a cell in screen pixels, and the numbers of columns and rows, so that all cells fit. */
export function layout(count, width, maxHeight, maxSize) {
  let size = Math.floor(Math.sqrt((width * maxHeight) / Math.max(1, count)));
  size = Math.max(1, Math.min(size, maxSize, width));
  while (size > 1 && Math.ceil(count / Math.floor(width / size)) * size > maxHeight) size -= 1;
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, rows: Math.max(1, Math.ceil(count / columns)) };
}

/** The look of a cell: its state, and for shared blocks the number of references, in four steps. */
export function lookOf(cell) {
  const state = stateOf(cell);
  if (state !== 3) return state;
  const references = referencesOf(cell);
  return references < 4 ? 3 : 16 + (references < 8 ? 0 : references < 16 ? 1 : 2);
}

/** Whether a pixel of a cell is filled: each look has a pattern, which distinguishes states without colour. */
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

/** A picture of the cells; only cells that have changed are drawn again. */
export class CellPicture {
  #drawn = new Uint8Array(0);
  #sprites = [];

  /** `sprites[look]` are the pixels of a cell, `sprites[look + 8]` those of a dimmed cell. */
  shape(count, { size, columns, rows }, sprites, ground) {
    this.size = size;
    this.columns = columns;
    this.width = size * columns;
    this.height = size * rows;
    this.pixels = new Uint32Array(this.width * this.height).fill(ground);
    this.#drawn = new Uint8Array(count).fill(NOTHING);
    this.#sprites = sprites;
  }

  /** Draw what has changed; return the changed pixel rows, or null. If `only` is a state, other cells are dimmed. */
  update(cells, only = null) {
    let first = -1, last = -1;
    const drawn = this.#drawn;
    for (let index = 0; index < drawn.length; index += 1) {
      const look = lookOf(cells[index]) + (only === null || stateOf(cells[index]) === only ? 0 : DIM);
      if (drawn[index] === look) continue;
      drawn[index] = look;
      this.#put(index, this.#sprites[look]);
      if (first < 0) first = index;
      last = index;
    }
    if (first < 0) return null;
    const top = Math.floor(first / this.columns) * this.size;
    return { top, height: (Math.floor(last / this.columns) + 1) * this.size - top };
  }

  #put(index, pixels) {
    const { size, width } = this;
    let to = Math.floor(index / this.columns) * size * width + (index % this.columns) * size;
    for (let from = 0; from < pixels.length; from += size, to += width) {
      for (let x = 0; x < size; x += 1) this.pixels[to + x] = pixels[from + x];
    }
  }
}
