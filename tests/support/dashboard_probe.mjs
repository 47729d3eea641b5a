// Runs what of the dashboard's code needs no page: reads [name, argument] pairs as JSON on stdin, writes what each gave.
import { readFileSync } from "node:fs";

const from = (name) => import(`${process.argv[2]}/${name}.js`);
const [{ branches }, cells, { lanes }, { Store }, watch, words] = await Promise.all(
  ["branches", "cells", "lanes", "store", "watch", "words"].map(from),
);

/** A picture that was drawn change by change, beside one that is drawn at once: where the two differ. */
function drawn({ frames, shape, only }) {
  const sprites = [];
  for (let look = 0; look < 32; look += 1) sprites[look] = cells.sprite(look % 8, shape.size, 1000 + look, 7);
  const fresh = () => {
    const picture = new cells.CellPicture();
    picture.shape(frames[0].length, shape, sprites, 7);
    return picture;
  };
  const kept = fresh();
  return frames.map((frame, at) => {
    const before = kept.pixels.slice(), changed = kept.update(frame, only[at]), whole = fresh();
    whole.update(frame, only[at]);
    const rows = [...before.keys()].filter((pixel) => before[pixel] !== kept.pixels[pixel])
      .map((pixel) => Math.floor(pixel / kept.width));
    const outside = rows.filter((row) => !changed || row < changed.top || row >= changed.top + changed.height);
    return { unequal: whole.pixels.filter((pixel, place) => pixel !== kept.pixels[place]).length, outside: outside.length };
  });
}

function kept(snapshots) {
  const store = new Store();
  return snapshots.map(({ isFirst, ...snapshot }) => {
    if (isFirst) store.begin();
    store.take(snapshot);
    const { outputRate, firstToken_s, hitRate } = store;
    return { steps: store.steps.map(({ step }) => step), history: store.history.map(({ at_s }) => at_s), outputRate,
      firstToken_s, hitRate };
  });
}

/** A page that listens to a server of this script: each line is an answer. Timers ring at once, on a clock of their own. */
async function listened(script) {
  let now_ms = 0, at = 0;
  const told = [], heard = [], waits = [], keys = [], really = { setTimeout, fetch, performance };
  globalThis.sessionStorage = { getItem: () => "secret", setItem() {}, removeItem() {} };
  globalThis.performance = { now: () => now_ms };
  globalThis.setTimeout = (ring, ms) => {
    if (ms < 15_000) waits.push(ms), now_ms += ms, queueMicrotask(ring);
  };
  const listening = new Promise((resolve) => {
    const page = new watch.Watch((snapshot) => heard.push(snapshot), (state) => {
      told.push(state.state === "refused" ? `refused ${state.status}` : state.state);
      if (state.state === "refused") resolve();
      if (state.state === "connecting" && at === script.length) page.stop(), resolve();
    });
    globalThis.fetch = async (path, { headers }) => {
      const answer = script[at];
      at += 1;
      keys.push([path, headers.Authorization]);
      if (answer === undefined || answer === null) throw new Error("nobody is there");
      if (typeof answer === "number") return new Response('{"error": {"message": "no"}}', { status: answer });
      return new Response(answer);
    };
    page.start("a model");
  });
  await listening;
  Object.assign(globalThis, really);
  return { told, heard, waits, keys };
}

const CALLS = {
  listened,
  events: (pieces) => { const reader = new watch.EventReader(); return pieces.map((piece) => reader.read(piece)); },
  waits: ([failures, dice]) => watch.waitAfter(failures, () => dice),
  layout: (given) => cells.layout(...given),
  decode: (text) => [...cells.decode(text)].map((cell) => [cells.stateOf(cell), cells.referencesOf(cell), cells.lookOf(cell)]),
  numbers: ([cell, perCell]) => [cells.blockOf(cell, perCell), cells.cellOf(cells.blockOf(cell, perCell) + perCell - 1, perCell)],
  sprite: ([look, size]) => [...cells.sprite(look, size, 1, 0)],
  drawn,
  lanes: ([requests, from_s]) => lanes(requests, from_s),
  branches: (nodes) => branches(nodes),
  kept,
  words: ([name, ...given]) => words[name](...given),
};

const told = [];
for (const [name, given] of JSON.parse(readFileSync(0, "utf8"))) told.push((await CALLS[name](given)) ?? null);
process.stdout.write(JSON.stringify(told));
