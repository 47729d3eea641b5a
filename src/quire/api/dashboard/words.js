// Numbers and times as text.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const NONE = "–";

export const whole = (number) => (number == null ? NONE : WHOLE.format(number));

/** A number with at most four digits, such as 9,999 or 12.3K. */
export const short = (number) => (number == null ? NONE : Math.abs(number) < 10_000 ? whole(number) : SHORT.format(number));

export const percent = (part) => (part == null ? NONE : `${(100 * part).toFixed(part > 0 && part < 0.0995 ? 1 : 0)}%`);

export const many = (number, noun, plural = `${noun}s`) => `${whole(number)} ${number === 1 ? noun : plural}`;

/** A duration with its unit. */
export function span(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

export const ago = (seconds) => (seconds < 1 ? "now" : `${span(Math.round(seconds))} ago`);

export function median(numbers) {
  const sorted = numbers.filter((number) => number != null).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** A round number not below this one, for the top of an axis. */
export function roundUp(number) {
  if (!(number > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(number));
  return power * [1, 1.2, 1.6, 2, 2.5, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= number * 0.9999);
}

/** Round numbers from 0 to `top`, at equal distances, about `maxCount` at most. */
export function ticks(top, maxCount) {
  const power = 10 ** Math.floor(Math.log10(top / maxCount || 1));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power * maxCount >= top);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, index) => index * step);
}
