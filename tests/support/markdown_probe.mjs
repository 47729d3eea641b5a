// Reads texts as JSON on stdin, and writes what the page's Markdown makes of each: a tree of [name, attributes,
// children], on a document that knows elements and text and nothing else.
import { readFileSync } from "node:fs";

class Element {
  constructor(name) { this.localName = name; this.attributes = {}; this.childNodes = []; }
  setAttribute(key, value) { this.attributes[key] = value; }
  append(...nodes) { this.childNodes.push(...nodes); }
  addEventListener() {}
  told() { return [this.localName, this.attributes, this.childNodes.map((node) => node.told?.() ?? node)]; }
}

globalThis.document = { createElement: (name) => new Element(name) };
const { nodesOf } = await import(process.argv[2]);
const processorMs = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1000; };
const answers = JSON.parse(readFileSync(0, "utf8")).map((text) => {
  const began = processorMs();
  const nodes = nodesOf(text);
  return { ms: processorMs() - began, nodes: nodes.map((node) => node.told?.() ?? node) };
});
process.stdout.write(JSON.stringify(answers));
