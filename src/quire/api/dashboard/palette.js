// Colours: they stand in the style sheet, and are read from it, so that canvases follow the theme.

const THEME = "quire.theme";
const PROBE = document.createElement("span");
const NAMES = [
  "ink", "soft", "card", "line", "accent", "free", "cached", "used", "shared-2", "shared-4", "shared-8", "shared-16",
  "pinned", "computing", "prompt", "output", "waiting", "preempted",
];

export const colours = {};

/** The colours of the theme of this moment, as [r, g, b]. */
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

/** So much of one colour, the rest of another. */
export const mixed = (one, other, part) => one.map((value, at) => Math.round(value * part + other[at] * (1 - part)));

const straight = (one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * straight(r / 255) + 0.7152 * straight(g / 255) + 0.0722 * straight(b / 255);

/** Black or white, whichever can be read on it. */
export const inkOn = (rgb) => (luminance(rgb) > 0.179 ? [0, 0, 0] : [255, 255, 255]);

/** Of a block that so many hold, or of a node of the tree. */
export function heat(references) {
  if (references < 1) return "cached";
  if (references < 2) return "used";
  return `shared-${references < 4 ? 2 : references < 8 ? 4 : references < 16 ? 8 : 16}`;
}

const tiles = new Map();

/** A filling that is distinct without its colour: "solid", "stripes", "dots" or "grid". */
export function filling(context, name, kind) {
  const key = `${name} ${kind} ${css(name)} ${css("card")}`;
  if (kind === "solid") return css(name);
  if (!tiles.has(key)) tiles.set(key, tile(name, kind));
  return context.createPattern(tiles.get(key), "repeat");
}

function tile(name, kind) {
  const size = 6, made = new OffscreenCanvas(size, size), context = made.getContext("2d");
  context.fillStyle = css(mixed(colours[name], colours.card, kind === "dots" ? 0.18 : 0.45));
  context.fillRect(0, 0, size, size);
  context.fillStyle = css(name);
  for (let at = 0; at < size; at += 1) {
    if (kind === "stripes") context.fillRect(at, size - 1 - at, 2, 1), context.fillRect(at - size, size - 1 - at, 2, 1);
    if (kind === "grid") context.fillRect(at, 0, 1, 2), context.fillRect(0, at, 2, 1);
  }
  if (kind === "dots") context.fillRect(1, 1, 2, 2), context.fillRect(4, 4, 1, 1);
  return made;
}

/** Follow the system's setting or the user's choice; `redraw` is called when it changes, and not at first. */
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
