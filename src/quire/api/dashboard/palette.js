// Colours: they are defined in the style sheet and read from it, so that canvases follow the theme.

const THEME = "quire.theme";
const PROBE = document.createElement("span");
const NAMES = [
  "ink", "soft", "card", "line", "accent", "free", "cached", "used", "shared-2", "shared-4", "shared-8", "shared-16",
  "pinned", "computing", "prompt", "output", "waiting", "preempted",
];

export const colours = {};

/** Read the colours of the current theme, as [r, g, b]. */
function read() {
  PROBE.hidden = true;
  document.body.append(PROBE);
  for (const name of NAMES) {
    PROBE.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(PROBE).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  }
  PROBE.remove();
}

export const css = (name, alpha = 1) => {
  const [r, g, b] = typeof name === "string" ? colours[name] : name;
  return `rgb(${r} ${g} ${b} / ${alpha})`;
};

/** A mixture of two colours; `part` is the fraction of the first. */
export const mixed = (a, b, part) => a.map((value, index) => Math.round(value * part + b[index] * (1 - part)));

const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);

/** Black or white, whichever has more contrast to this colour. */
export const inkOn = (rgb) => (luminance(rgb) > 0.179 ? [0, 0, 0] : [255, 255, 255]);

/** The colour name of a block, or of a node of the tree, with this number of references. */
export function heat(references) {
  if (references < 1) return "cached";
  if (references < 2) return "used";
  return `shared-${references < 4 ? 2 : references < 8 ? 4 : references < 16 ? 8 : 16}`;
}

const tiles = new Map();

/** A fill style whose pattern is distinct without its colour: "solid", "stripes", "dots" or "grid". */
export function filling(context, name, kind) {
  const key = `${name} ${kind} ${css(name)} ${css("card")}`;
  if (kind === "solid") return css(name);
  if (!tiles.has(key)) tiles.set(key, tile(name, kind));
  return context.createPattern(tiles.get(key), "repeat");
}

function tile(name, kind) {
  const size = 6, canvas = new OffscreenCanvas(size, size), context = canvas.getContext("2d");
  context.fillStyle = css(mixed(colours[name], colours.card, kind === "dots" ? 0.18 : 0.45));
  context.fillRect(0, 0, size, size);
  context.fillStyle = css(name);
  for (let x = 0; x < size; x += 1) {
    if (kind === "stripes") context.fillRect(x, size - 1 - x, 2, 1), context.fillRect(x - size, size - 1 - x, 2, 1);
    if (kind === "grid") context.fillRect(x, 0, 1, 2), context.fillRect(0, x, 2, 1);
  }
  if (kind === "dots") context.fillRect(1, 1, 2, 2), context.fillRect(4, 4, 1, 1);
  return canvas;
}

/** Follow the system's theme or the user's choice; `redraw` is called after each change, but not initially. */
export function followTheme(choice, redraw) {
  const change = () => {
    document.documentElement.dataset.theme = choice.value;
    read();
    tiles.clear();
  };
  choice.value = localStorage.getItem(THEME) ?? "system";
  if (!choice.value) choice.value = "system";
  change();
  choice.addEventListener("change", () => { localStorage.setItem(THEME, choice.value); change(); redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { change(); redraw(); });
}
