// Formats numbers and times for people; an unknown value is null and becomes a dash.

import { el, unknown } from "./dom.js";

export const DASH = "–";
const NB = "\u00a0"; // a number stays with its unit

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const significant = (value) => Number(value.toPrecision(3));
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const huge = new Intl.NumberFormat("en", { notation: "scientific", maximumSignificantDigits: 3 });

/** A count: in full up to 9,999, then 12.3K, 4.56M, 1.2E18. */
export function count(value) {
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e15) return huge.format(value);
  if (size >= 1e4) return short.format(value);
  return size >= 100 || Number.isInteger(value) ? plain.format(value) : String(significant(value));
}

/** A rate per second. */
export const rate = (value) => (isNumber(value) ? `${count(value)}/s` : DASH);

/** A share of 1 in percent; only exactly 1 becomes 100 %, only exactly 0 becomes 0 %. */
export function percent(value) {
  if (!isNumber(value)) return DASH;
  const whole = value * 100;
  if (Number.isInteger(whole)) return `${plain.format(whole)}${NB}%`;
  if (whole > 0 && whole < 0.01) return `<${NB}0.01${NB}%`;
  if (whole < 100 && whole > 99.99) return `>${NB}99.99${NB}%`;
  return `${whole.toFixed(whole > 99.9 || whole < 0.1 ? 2 : 1)}${NB}%`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Bytes in powers of 1,024. */
export function bytes(value) {
  if (!isNumber(value)) return DASH;
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1023.5 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size >= 1e6 ? huge.format(size) : significant(size)}${NB}${UNITS[unit]}`;
}

function twoUnits(total, large, largeName, small, smallName) {
  const first = Math.floor(total / large);
  const second = Math.floor((total % large) / small);
  const name = `${first >= 1e6 ? huge.format(first) : plain.format(first)}${NB}${largeName}`;
  return second ? `${name}${NB}${second}${NB}${smallName}` : name;
}

/** A text as the end of a sentence: with a full stop, and never with two. */
export const ended = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

/** A sentence without line breaks between a number and its unit. */
export const unbroken = (text) => text.replace(/(\d) (?=(?:%|[a-zµ]{1,3}\b))/gi, `$1${NB}`);

/** Seconds as µs, ms, s, or two units up to days. */
export function duration(value) {
  if (!isNumber(value)) return DASH;
  if (value < 0) return `−${duration(-value)}`;
  if (value === 0) return `0${NB}s`;
  if (value < 0.0009995) return `${significant(value * 1e6)}${NB}µs`;
  if (value < 0.9995) return `${significant(value * 1e3)}${NB}ms`;
  if (value < 59.95) return `${significant(value)}${NB}s`;
  const whole = Math.round(value);
  if (whole < 3600) return twoUnits(whole, 60, "min", 1, "s");
  if (whole < 86400) return twoUnits(whole, 3600, "h", 60, "min");
  return twoUnits(whole, 86400, "d", 3600, "h");
}

/** Unix seconds of a number or an ISO 8601 text, null of anything else. */
export function instant(value) {
  const at = typeof value === "string" ? Date.parse(value) / 1000 : value;
  return isNumber(at) && Math.abs(at) < 8.64e12 ? at : null;
}

const clocks = {
  minute: new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" }),
  second: new Intl.DateTimeFormat(undefined, {
    hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
  }),
  day: new Intl.DateTimeFormat(undefined, {
    day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23",
  }),
};

/** Time of day in the viewer's zone; `fine`: minute, second or day (with the date). */
export function clock(value, fine = "minute") {
  const at = instant(value);
  return at === null ? DASH : clocks[fine].format(at * 1000);
}

/** A time in the viewer's zone, with UTC as its tooltip. */
export function stamp(value, fine = "day") {
  const at = instant(value);
  if (at === null) return unknown();
  const iso = new Date(at * 1000).toISOString();
  return el("time", { datetime: iso, title: `${iso.slice(0, 19).replace("T", " ")} UTC` }, clock(at, fine));
}

/** Any value of a table cell: objects and lists as JSON, a missing value as a dash. */
export function shown(value) {
  if (value === null || value === undefined || value === "") return unknown();
  if (typeof value === "number") return isNumber(value) ? exact(value) : unknown();
  if (typeof value === "object") return JSON.stringify(value);
  return String(value);
}

/** A number with enough digits to compare a measured value with its threshold. */
export function exact(value) {
  if (!isNumber(value)) return DASH;
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return plain.format(value);
  const size = Math.abs(value);
  return size >= 1e-4 && size < 1e9 ? String(Number(value.toPrecision(5))) : value.toExponential(2);
}

/** `words_like_this` as words. */
export const words = (name) => String(name).replaceAll("_", " ");
