// Converts values to pixels, and finds round values for lines and labels. Pure functions.

/** A linear scale; if the domain is a single value, that value is in the middle. */
export function linear([low, high], [from, to]) {
  const extent = high - low;
  return (value) => (extent > 0 ? from + ((value - low) / extent) * (to - from) : (from + to) / 2);
}

/** A logarithmic scale; values of 0 or less are at its lower end. */
export function logarithmic([low, high], range) {
  const inner = linear([Math.log10(low), Math.log10(high)], range);
  return (value) => inner(Math.log10(Math.max(value, low)));
}

/** The round number at or above `value`: 1, 2 or 5 times a power of ten. */
export function roundUp(value) {
  if (!(value > 0) || !Number.isFinite(value)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const found = [1, 2, 5, 10].find((each) => each * power >= value * 0.999999);
  return Number.isFinite(found * power) ? found * power : value;
}

/** The marks of an axis: 0, half, and the top. */
export function ticks(high) {
  return [0, high / 2, high];
}

/** The whole decades that contain all values; without values, from a millisecond to a second. */
export function decades(low, high) {
  if (!(low > 0) || !Number.isFinite(high)) return decades(0.001, 1);
  const first = Math.floor(Math.log10(low) + 1e-9);
  const beyond = Math.max(first + 1, Math.ceil(Math.log10(high) - 1e-9));
  const step = Math.ceil((beyond - first) / 5);
  const found = [];
  for (let power = first; power < beyond + step; power += step) found.push(10 ** power);
  return found;
}

const STEPS_S = [60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 14400, 43200, 86400];

/** Round times within the domain, at most `most` of them. */
export function timeTicks([first, beyond], most) {
  const step = STEPS_S.find((each) => (beyond - first) / each <= most + 0.5);
  if (!step) return [];
  const found = [];
  for (let at = Math.ceil(first / step) * step; at <= beyond; at += step) found.push(at);
  return found;
}
