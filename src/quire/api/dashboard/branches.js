// Where each node of the prefix tree lies, without a page: from left to right by tokens from the beginning of a prompt,
// from top to bottom by how many hold it.

/** What a node and all below it weigh: hot ones more, cold ones a little. */
function weigh(nodes) {
  const below = nodes.map(() => 0), weights = nodes.map(() => 0);
  for (let at = nodes.length - 1; at >= 0; at -= 1) {
    weights[at] = Math.max(below[at], 1 + 3 * nodes[at].num_references);
    if (nodes[at].parent >= 0) below[nodes[at].parent] += weights[at];
  }
  return weights;
}

/** For each node, in parts of the whole: from which token to which, from which height to which. Parents come first. */
export function branches(nodes) {
  const weights = weigh(nodes), whole = nodes.reduce((sum, { parent }, at) => sum + (parent < 0 ? weights[at] : 0), 0) || 1;
  const children = nodes.map(() => []), roots = [], places = [];
  nodes.forEach(({ parent }, at) => (parent < 0 ? roots : children[parent]).push(at));
  const place = (inside, start, top) => {
    inside.sort((one, other) => weights[other] - weights[one] || one - other);
    for (const at of inside) {
      const height = weights[at] / whole, end = start + nodes[at].num_tokens;
      places[at] = { start, end, top, height };
      top += height;
    }
  };
  place(roots, 0, 0);
  nodes.forEach((_, at) => place(children[at], places[at].end, places[at].top));
  return { places, children, roots, numTokens: places.reduce((most, { end }) => Math.max(most, end), 0) };
}
