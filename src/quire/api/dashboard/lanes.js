// The rows of the timeline, without access to the page: a request may follow another in a row if that one had ended.

const began = ({ segments }) => segments[0]?.[1] ?? 0;
const ended = ({ segments }) => segments.at(-1)?.[2] ?? Infinity;

/** The requests that were open after `from_s`, each with its row; and the number of rows. */
export function lanes(requests, from_s) {
  const visible = requests.filter((request) => request.segments.length && ended(request) > from_s);
  const free_s = [];
  const placed = visible.sort((a, b) => began(a) - began(b)).map((request) => {
    let row = free_s.findIndex((end_s) => end_s <= began(request));
    if (row < 0) row = free_s.push(0) - 1;
    free_s[row] = ended(request);
    return { request, row };
  });
  return { placed, numRows: free_s.length };
}
