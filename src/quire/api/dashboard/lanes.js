// Which requests lie in which row of the timeline, without a page: one that began after another had ended may follow it.

const began = ({ segments }) => segments[0]?.[1] ?? 0;
const ended = ({ segments }) => segments.at(-1)?.[2] ?? Infinity;

/** The requests that reach into the window, each with its row; and how many rows there are. */
export function lanes(requests, from_s) {
  const seen = requests.filter((one) => one.segments.length && ended(one) > from_s);
  const free_s = [];
  const placed = seen.sort((one, other) => began(one) - began(other)).map((request) => {
    let row = free_s.findIndex((end_s) => end_s <= began(request));
    if (row < 0) row = free_s.push(0) - 1;
    free_s[row] = ended(request);
    return { request, row };
  });
  return { placed, numRows: free_s.length };
}
