// What the charts show, computed from the series of `/dashboard/data`. Pure; any part of it may be null.

import { isNumber } from "./format.js";

/** Sources of answers, each with its name and its tone on the whole page. */
export const SOURCES = [
  { name: "l1", label: "L1, in process", brief: "L1", tone: "l1" },
  { name: "l2", label: "L2, Redis", brief: "L2", tone: "l2" },
  { name: "live", label: "live inference", brief: "live", tone: "live" },
  { name: "previous", label: "previous generation", brief: "previous", tone: "previous" },
  { name: "default", label: "defaults", brief: "default", tone: "default" },
];

export const RECENT_S = 300;

const list = (value) => (Array.isArray(value) ? value : []);

/** An object without a prototype, so that it has no names but these. */
const named = (entries) => Object.assign(Object.create(null), Object.fromEntries(entries));

/** The series without the newest, incomplete bin, which would look like a drop. */
export function complete(data) {
  const series = data?.series ?? {};
  const step = isNumber(series.step_s) && series.step_s > 0 ? series.step_s : 10;
  let at = list(series.at).filter(isNumber);
  const now = data?.now;
  if (at.length > 1 && isNumber(now) && at[at.length - 1] + step > now + 0.001) at = at.slice(0, -1);
  const bins = (values) => at.map((_, index) => (isNumber(values?.[index]) ? values[index] : null));
  const each = (parts) =>
    named(Object.entries(parts ?? {}).map(([name, values]) => [name, bins(values)]));
  return {
    step,
    at,
    lately: data?.lately?.answers ?? null,
    requests: bins(series.requests),
    answers: each(series.answers),
    stages: each(series.stages),
    misses: each(series.misses),
    events: each(series.events),
    seconds: named(Object.entries(series.seconds ?? {}).map(([name, parts]) => [name, each(parts)])),
  };
}

/** Sum of the known values; null without any. */
export function sum(values) {
  const known = values.filter(isNumber);
  if (!known.length) return null;
  const total = known.reduce((left, right) => left + right, 0);
  return isNumber(total) ? total : null;
}

/** The largest known value. */
export function most(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((left, right) => Math.max(left, right)) : null;
}

/** The newest known value. */
export function last(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) {
    if (isNumber(values[index])) return values[index];
  }
  return null;
}

/** The last bins that cover `seconds`. */
export const recent = (series, values, seconds = RECENT_S) =>
  values.slice(-Math.max(1, Math.round(seconds / series.step)));

/** Each source's share of the answers in each bin; null without requests. */
export function shares(series) {
  const names = SOURCES.map((source) => source.name);
  const totals = series.at.map((_, bin) => sum(names.map((name) => series.answers[name]?.[bin])));
  return Object.fromEntries(
    names.map((name) => [
      name,
      totals.map((total, bin) => (total > 0 ? (series.answers[name]?.[bin] ?? 0) / total : null)),
    ]),
  );
}

/** Answers of the last minutes by source, and their sum: from the service's own totals, else from whole bins. */
export function recentAnswers(series) {
  const by = Object.fromEntries(
    SOURCES.map(({ name }) => [name, series.lately?.[name] ?? sum(recent(series, series.answers[name] ?? []))]),
  );
  return { by, total: sum(Object.values(by)) };
}

/** Share of the last minutes' answers that came from a stored record; null if there were none. */
export function storedShare(series) {
  const { by, total } = recentAnswers(series);
  return total > 0 ? ((by.l1 ?? 0) + (by.l2 ?? 0)) / total : null;
}

/** Bins in at most `rows` groups, oldest first, as [first, end), the end excluded. */
export function groups(length, rows = 12) {
  const size = Math.max(1, Math.ceil(length / rows));
  const found = [];
  for (let end = length; end > 0; end -= size) found.unshift([Math.max(0, end - size), end]);
  return found;
}

/** The series as table rows of a few minutes each; `columns` are [values, how to sum up, how to show]. */
export function rows(series, columns) {
  return groups(series.at.length).map(([first, beyond]) => ({
    at: series.at[first],
    cells: columns.map(([values, combine, show]) => show(combine(values.slice(first, beyond)))),
  }));
}

/** How long the series is, in words. */
export function span(series) {
  const seconds = series.at.length * series.step;
  if (seconds >= 5400) return `${Math.round(seconds / 3600)} hours`;
  if (seconds >= 60) return `${Math.round(seconds / 60)} minutes`;
  return `${Math.round(seconds)} seconds`;
}
