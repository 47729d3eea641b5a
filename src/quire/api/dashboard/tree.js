// The prefix tree as an icicle chart: prompts begin at the left, a common prefix is one bar, and the height of a bar
// grows with the number of sequences that use it.
import { branches } from "./branches.js";
import { Pointing, Sheet } from "./canvas.js";
import { colours, css, heat, inkOn } from "./palette.js";
import { many, short, ticks, whole } from "./words.js";

const BOTTOM = 22;
const MIN_HEIGHT = 0.6;

export class TreeMap {
  #nodes = [];
  #shape = branches([]);

  constructor(at, choose) {
    this.summary = at("tree-summary");
    this.sheet = new Sheet(at("tree-chart"), (context, width, height) => this.#draw(context, width, height));
    this.pointing = new Pointing(at("tree-chart"), at("tree-words"), {
      count: () => this.#nodes.length,
      find: (x, y) => this.#find(x, y),
      describe: (node) => this.#describe(node),
      step: (node, key) => this.#step(node, key),
      first: () => this.#shape.roots[0] ?? -1,
      point: () => this.sheet.redraw(),
      choose: (node) => choose(this.#nodes[node].id),
    });
  }

  update({ nodes, num_nodes = 0, is_drawn = true }) {
    this.#nodes = nodes;
    this.#shape = branches(nodes);
    this.sheet.redraw();
    this.pointing.refresh();
    const [hottest] = [...nodes].sort((a, b) => b.num_references - a.num_references);
    const hot = hottest?.num_references > 1
      ? ` The hottest: ${many(hottest.num_tokens, "token")} held by ${whole(hottest.num_references)}.` : "";
    this.summary.textContent = nodes.length
      ? `${num_nodes > nodes.length ? `${whole(nodes.length)} of ` : ""}${many(Math.max(num_nodes, nodes.length), "branch",
        "branches")}, the longest prompt ${many(this.#shape.numTokens, "token")}.${hot}`
      : is_drawn ? "Nothing is cached yet." : "Waiting for the first picture of what is cached.";
  }

  #box(at) {
    const { start, end, top, height } = this.#shape.places[at], across = this.sheet.width / (this.#shape.numTokens || 1);
    const down = this.sheet.height - BOTTOM;
    return { x: start * across, y: top * down, width: (end - start) * across, height: height * down };
  }

  #find(x, y) {
    return this.#nodes.findIndex((_, at) => {
      const box = this.#box(at);
      return x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height;
    });
  }

  #step(node, key) {
    const { parent } = this.#nodes[node], { children, roots } = this.#shape;
    if (key === "ArrowLeft") return parent < 0 ? node : parent;
    if (key === "ArrowRight") return children[node][0] ?? node;
    const siblings = parent < 0 ? roots : children[parent];
    const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10 }[key];
    return siblings[Math.max(0, Math.min(siblings.length - 1, siblings.indexOf(node) + by))];
  }

  #describe(at) {
    const { id, num_tokens, num_references, cache_group } = this.#nodes[at], { start } = this.#shape.places[at];
    const from = start ? `after ${many(start, "token")}` : "from the beginning";
    const held = num_references ? `held by ${whole(num_references)}` : "cached, held by none";
    return `${many(num_tokens, "token")} ${from}, ${held}; group ${cache_group ?? "–"}; first block ${whole(id)}`;
  }

  #draw(context, width, height) {
    if (this.#nodes.length) this.#axis(context, width, height);
    this.#nodes.forEach((node, at) => {
      const box = this.#box(at);
      if (box.height < MIN_HEIGHT) return;
      const rgb = colours[heat(node.num_references)];
      const gap = box.height > 3 ? 1 : 0;
      context.fillStyle = css(rgb);
      context.fillRect(box.x, box.y, Math.max(1, box.width - 1), box.height - gap);
      this.#write(context, box, node, rgb);
    });
    if (!(this.pointing?.at >= 0)) return;
    const box = this.#box(this.pointing.at);
    context.lineWidth = 4;
    context.strokeStyle = css("card");
    context.strokeRect(box.x, box.y, Math.max(2, box.width - 1), Math.max(2, box.height - 1));
    context.lineWidth = 2;
    context.strokeStyle = css("ink");
    context.strokeRect(box.x, box.y, Math.max(2, box.width - 1), Math.max(2, box.height - 1));
  }

  #write(context, box, { num_references, num_tokens, parent, cache_group }, rgb) {
    if (box.height < 14 || box.width < 22) return;
    const held = num_references ? `${num_references}×` : "0";
    const long = `${held} · ${short(num_tokens)}${parent < 0 && cache_group ? ` · ${cache_group}` : ""}`;
    const words = [long, `${held} · ${short(num_tokens)}`, held]
      .find((text) => context.measureText(text).width < box.width - 8);
    if (!words) return;
    context.textAlign = "left";
    context.fillStyle = css(inkOn(rgb));
    context.fillText(words, box.x + 4, box.y + box.height / 2);
  }

  #axis(context, width, height) {
    context.lineWidth = 1;
    const top = this.#shape.numTokens || 1;
    for (const token of ticks(top, width < 320 ? 3 : 5)) {
      const x = Math.min(width - 0.5, Math.round((token / top) * width) + 0.5);
      context.strokeStyle = css("line");
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - BOTTOM);
      context.stroke();
      context.fillStyle = css("soft");
      context.textAlign = token ? (x > width - 24 ? "right" : "center") : "left";
      context.fillText(token ? short(token) : "token 0", x, height - BOTTOM / 2 + 1);
    }
  }
}
