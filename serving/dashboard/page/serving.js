// How requests are answered: sources, misses, latency, requests, stages, queue.

import { described, extent, TimeChart } from "./chart.js";
import { el, keyed, say } from "./dom.js";
import { count, duration, isNumber, percent, rate, words } from "./format.js";
import { bar, facts, mark, panel, replace, table, tabular, timed } from "./panel.js";
import { decades } from "./scale.js";
import { last, most, recent, recentAnswers, rows, shares, SOURCES, span, storedShare, sum } from "./series.js";

function answers() {
  const part = panel("serving", "Where answers come from", 8);
  const chart = new TimeChart({ kind: "stack", format: percent, height: 270 });
  part.body.append(chart.node);
  const tell = tabular(part.body, part.title, (series) =>
    table("Where answers came from, by time", ["From", "Answers", ...SOURCES.map((source) => source.brief)],
      timed(rows(series, [
        [series.at.map((_, bin) => sum(SOURCES.map(({ name }) => series.answers[name]?.[bin]))), sum, count],
        ...SOURCES.map(({ name }) => [series.answers[name] ?? [], sum, count]),
      ]))));
  return (data, series) => {
    const by = shares(series);
    const now = recentAnswers(series);
    const lines = SOURCES.map(({ name, label, tone }) => ({
      name, label, tone, values: by[name],
      told: percent(now.total > 0 ? (now.by[name] ?? 0) / now.total : null),
    }));
    const stored = storedShare(series);
    part.lede(stored === null ? (now.total === 0 ? "No requests in the last 5 minutes." : "Not known yet.")
      : `${percent(stored)} from a stored record in the last 5 minutes.`);
    chart.draw({ ...series, lines, high: 1, summary: described(`${part.title} over ${span(series)}; last 5 minutes`, lines) });
    tell(series, series.at.length);
  };
}

const MOST_REASONS = 8;

function misses() {
  const part = panel("serving", "Why answers were missed", 4);
  const list = el("ol", { class: "bars" });
  part.body.append(list);
  return (data, series) => {
    const found = Object.entries(data.totals?.misses ?? {})
      .map(([reason, total]) => ({ reason, total, now: sum(recent(series, series.misses[reason] ?? [])) }))
      .filter((each) => isNumber(each.total) && each.total > 0)
      .sort((left, right) => right.total - left.total);
    const all = sum(found.map((each) => each.total));
    const top = found.slice(0, MOST_REASONS);
    part.lede(all === null ? (data.totals?.misses ? "None since the start." : "Not known yet.")
      : `${count(all)} since the start${found.length > MOST_REASONS ? `; the first ${MOST_REASONS} of ${found.length} reasons` : ""}.`);
    keyed(list, top, {
      key: (each) => each.reason,
      make: (each) => el("li", {}, el("span", { class: "name" }, words(each.reason)), el("span", { class: "value" }), el("span")),
      update: (node, { total, now }) => {
        say(node.children[1], `${count(total)} · ${percent(total / all)}`);
        node.children[1].title = isNumber(now) ? `${count(now)} in the last 5 minutes` : "";
        replace(node.children[2], bar(total / top[0].total, "accent"));
      },
    });
  };
}

const QUANTILES = [["p50", "p50", 1], ["p99", "p99", 2], ["p999", "p99.9", 3]];

function latency() {
  const part = panel("serving", "Latency by source", 12);
  part.lede("Inside the service, from the start of a request to its answer, without network and client; on one logarithmic scale.");
  const grid = el("div", { class: "multiples" });
  part.body.append(grid);
  const charts = SOURCES.map((source) => {
    const chart = new TimeChart({ kind: "lines", format: duration, height: 130, log: true });
    grid.append(el("div", { class: "multiple" }, el("h4", {}, source.label), chart.node));
    return { source, chart };
  });
  const quantile = (series, source, name) => series.seconds[source]?.[name] ?? [];
  const tell = tabular(part.body, part.title, (series) =>
    table("Worst latency of each stretch of time, by source",
      ["From", ...SOURCES.flatMap((source) => QUANTILES.map(([, label]) => `${source.brief} ${label}`))],
      timed(rows(series, SOURCES.flatMap((source) =>
        QUANTILES.map(([name]) => [quantile(series, source.name, name), most, duration]))))));
  return (data, series) => {
    const all = SOURCES.flatMap(({ name }) => QUANTILES.flatMap(([each]) => quantile(series, name, each)));
    const shared = decades(...extent(all.filter((value) => isNumber(value) && value > 0)));
    for (const { source, chart } of charts) {
      const lines = QUANTILES.map(([name, label, depth]) => {
        const values = quantile(series, source.name, name);
        return { name, label, tone: `depth-${depth}`, values, told: duration(last(values)) };
      });
      chart.draw({ ...series, lines, decades: shared, summary: described(`Latency of answers from ${source.label}`, lines) });
    }
    tell(series, series.at.length);
  };
}

function requests() {
  const part = panel("serving", "Requests per second", 4);
  const chart = new TimeChart({ kind: "stack", format: rate, height: 150, legend: false });
  part.body.append(chart.node);
  const tell = tabular(part.body, part.title, (series) =>
    table("Requests by time", ["From", "Requests", "Most per second"], timed(rows(series, [
      [series.requests, sum, count],
      [series.requests, (bins) => most(bins) / series.step, rate],
    ]))));
  return (data, series) => {
    const values = series.requests.map((each) => (each === null ? null : each / series.step));
    const [now, peak] = [last(values), most(values)];
    part.lede(now === null ? "Not known yet." : `${rate(now)} now, ${rate(peak)} at most in ${span(series)}.`);
    chart.draw({ ...series, lines: [{ name: "requests", label: "requests", tone: "accent", values, told: rate(now) }],
      summary: `Requests per second over ${span(series)}: ${rate(now)} now, ${rate(peak)} at most.` });
    tell(series, series.at.length);
  };
}

const STAGES = [
  ["parse", "parse"], ["stored", "stored tiers"], ["live", "live"], ["previous", "previous"], ["render", "render"],
];
const perSecond = (value) => (isNumber(value) ? `${duration(value)}/s` : duration(value));

function stages() {
  const part = panel("serving", "Where time goes", 4);
  part.lede("Time spent per second, below L1. Inference runs within live.");
  const chart = new TimeChart({ kind: "stack", format: perSecond, height: 150, left: 64 });
  part.body.append(chart.node);
  const named = [...STAGES, ["inference", "inference"]];
  const tell = tabular(part.body, part.title, (series) =>
    table("Time spent in each stage, by time", ["From", ...named.map(([, label]) => label)],
      timed(rows(series, named.map(([name]) => [series.stages[name] ?? [], sum, duration])))));
  return (data, series) => {
    const lines = named.map(([name, label], index) => {
      const values = (series.stages[name] ?? []).map((each) => (each === null ? null : each / series.step));
      return { name, label, values, told: perSecond(last(values)), isApart: name === "inference",
        tone: name === "inference" ? "ink" : `n${index + 1}` };
    });
    chart.draw({ ...series, lines, summary: described(`${part.title}, per second`, lines) });
    tell(series, series.at.length);
  };
}

const BREAKERS = [["closed", "ok"], ["half_open", "warn"], ["open", "bad"]];

function queue() {
  const part = panel("serving", "Breaker and queue", 4);
  return (data) => {
    const breakers = data.breakers ?? {};
    const { live_queued: waiting, under_way: active, requests_max: limit, queue_seconds: turn, shed } = data.queue ?? {};
    const shedding = shed && typeof shed === "object" ? sum(Object.values(shed)) : shed;
    const states = BREAKERS.filter(([name]) => breakers[name] > 0);
    replace(part.body, facts([
      ["Breaker to Redis", states.length
        ? el("span", { class: "several" }, states.map(([name, level]) => mark(level, `${words(name)} in ${count(breakers[name])}`)))
        : "not known"],
      ["Requests below L1", isNumber(active) ? `${count(active)} of ${count(limit)} at most` : "not known"],
      ["Turn of the event loop", isNumber(turn) ? duration(turn) : "not known"],
      ["Inputs waiting for live", isNumber(waiting) ? count(waiting) : "not known"],
      ["Shed under overload", isNumber(shedding) ? count(shedding) : "not known"],
    ]));
  };
}

/** Returns all panels of this section, each as a function that draws it. */
export const serving = () => [answers(), misses(), latency(), requests(), stages(), queue()];
