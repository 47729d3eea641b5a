// The layout of the prefix tree, without access to the page: from left to right by tokens from the beginning of a
// prompt, from top to bottom by how many sequences use a node.

/** The weight of each node with all nodes below it: nodes with more references weigh more. */
function weightsOf(nodes) {
  const below = nodes.map(() => 0), weights = nodes.map(() => 0);
  for (let index = nodes.length - 1; index >= 0; index -= 1) {
    weights[index] = Math.max(below[index], 1 + 3 * nodes[index].num_references);
    if (nodes[index].parent >= 0) below[nodes[index].parent] += weights[index];
  }
  return weights;
}

/** For each node: its first and last token, and its top and height as fractions of the whole. Parents come first. */
export function branches(nodes) {
  const weights = weightsOf(nodes), whole = nodes.reduce((sum, node, i) => sum + (node.parent < 0 ? weights[i] : 0), 0) || 1;
  const children = nodes.map(() => []), roots = [], places = [];
  nodes.forEach(({ parent }, index) => (parent < 0 ? roots : children[parent]).push(index));
  const place = (siblings, start, top) => {
    siblings.sort((a, b) => weights[b] - weights[a] || a - b);
    for (const index of siblings) {
      const height = weights[index] / whole, end = start + nodes[index].num_tokens;
      places[index] = { start, end, top, height };
      top += height;
    }
  };
  place(roots, 0, 0);
  nodes.forEach((_, index) => place(children[index], places[index].end, places[index].top));
  return { places, children, roots, numTokens: places.reduce((highest, { end }) => Math.max(highest, end), 0) };
}
