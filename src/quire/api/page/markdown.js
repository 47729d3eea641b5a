// Converts Markdown to nodes. Text only ever becomes a text node, so nothing a model writes is read as markup; images
// are shown as their text, and a link is followed only when the user clicks it.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp(
  [
    /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, // code
    /\*\*([^\s*](?:[\s\S]*?[^\s])?)\*\*/, // strong
    /\*([^\s*](?:[^*]*[^\s*])?)\*/, // soft
    /!?\[([^[\]]*)\]\(([^()\s]*)\)/, // a link, or an image
  ].map((pattern) => pattern.source).join("|"),
);
const MAX_DEPTH = 8;

/** A new element with children; strings become text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Convert a text to nodes. */
export function nodesOf(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const nodes = [];
  for (let index = 0; index < lines.length; ) {
    const line = lines[index];
    if (!line.trim()) { index += 1; continue; }
    const read = depth < MAX_DEPTH ? special(lines, index, depth) : null;
    if (read) { nodes.push(read.node); index = read.next; continue; }
    const first = index;
    do index += 1; while (index < lines.length && lines[index].trim() && !begins(lines, index));
    nodes.push(make("p", {}, ...spans(lines.slice(first, index).join("\n"), 0)));
  }
  return nodes;
}

function begins(lines, index) {
  const line = lines[index];
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || RULE.test(line) || line.startsWith(">") ||
    isTable(lines, index);
}

function special(lines, index, depth) {
  const line = lines[index];
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, index, fence);
  const heading = HEADING.exec(line);
  if (heading) return { node: make(levelOf(heading[1]), {}, ...spans(heading[2], 0)), next: index + 1 };
  if (RULE.test(line)) return { node: make("hr"), next: index + 1 };
  if (line.startsWith(">")) return quote(lines, index, depth);
  if (ITEM.test(line)) return list(lines, index, depth);
  return isTable(lines, index) ? table(lines, index) : null;
}

// Headings in messages are below the page's own headings.
const levelOf = (marks) => `h${Math.min(6, marks.length + 2)}`;

function codeBlock(lines, index, [, mark, language]) {
  let end = index + 1;
  const isEnd = (line) => line.startsWith(mark) && !line.slice(mark.length).trim();
  while (end < lines.length && !isEnd(lines[end].trim())) end += 1;
  const text = lines.slice(index + 1, end).join("\n");
  const copy = make("button", { type: "button", class: "quiet small" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  const head = make("div", { class: "head" }, make("span", {}, language || "text"), copy);
  const node = make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", {}, text)));
  return { node, next: end + 1 };
}

function quote(lines, index, depth) {
  let end = index;
  while (end < lines.length && lines[end].startsWith(">")) end += 1;
  const inner = lines.slice(index, end).map((line) => line.replace(/^> ?/, ""));
  return { node: make("blockquote", {}, ...blocks(inner, depth + 1)), next: end };
}

function list(lines, index, depth) {
  const [, indent, mark] = ITEM.exec(lines[index]);
  const isNumbered = /\d/.test(mark);
  const node = make(isNumbered ? "ol" : "ul", isNumbered ? { start: String(parseInt(mark, 10)) } : {});
  let next = index;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isNumbered) break;
    const inner = [item[3]];
    const deeper = item[1].length + 2;
    next += 1;
    while (next < lines.length && (isDeeper(lines[next], deeper) || isGap(lines, next, deeper))) {
      inner.push(lines[next].slice(Math.min(deeper, indentOf(lines[next]))));
      next += 1;
    }
    node.append(make("li", {}, ...tight(blocks(inner, depth + 1))));
  }
  return { node, next };
}

const indentOf = (line) => line.length - line.trimStart().length;
const isDeeper = (line, deeper) => line.trim() && indentOf(line) >= deeper;
const isGap = (lines, i, deeper) => !lines[i].trim() && i + 1 < lines.length && isDeeper(lines[i + 1], deeper);
// An item that begins with a paragraph has its content without the paragraph's margins.
const tight = (nodes) => (nodes[0]?.localName === "p" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes);

const isTable = (lines, i) =>
  lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && TABLE_RULE.test(lines[i + 1]);

function table(lines, index) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (name, line) => make("tr", {}, ...cells(line).map((cell) => make(name, {}, ...spans(cell, 0))));
  let end = index + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const body = make("tbody", {}, ...lines.slice(index + 2, end).map((line) => row("td", line)));
  return { node: make("table", {}, make("thead", {}, row("th", lines[index])), body), next: end };
}

function spans(text, depth) {
  const nodes = [];
  let rest = text;
  while (rest) {
    const match = depth < MAX_DEPTH ? INLINE.exec(rest) : null;
    if (!match) { nodes.push(rest); break; }
    nodes.push(rest.slice(0, match.index));
    nodes.push(span(match, depth));
    rest = rest.slice(match.index + match[0].length);
  }
  return nodes.filter((node) => node !== "");
}

function span([whole, ticks, code, strong, soft, words, address], depth) {
  if (ticks) return make("code", {}, code);
  if (strong) return make("strong", {}, ...spans(strong, depth + 1));
  if (soft) return make("em", {}, ...spans(soft, depth + 1));
  if (whole.startsWith("!")) return `[picture: ${words || address}]`;
  if (!/^https?:\/\//i.test(address)) return whole;
  return make("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, words || address);
}
