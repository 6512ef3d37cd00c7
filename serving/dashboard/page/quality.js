// The quality of the served answers, the experiments, and the replicas.

import { el, unknown } from "./dom.js";
import { clock, count, duration, isNumber, percent, shown, words } from "./format.js";
import { facts, mark, panel, replace, table } from "./panel.js";

const known = (value, show) => (isNumber(value) ? show(value) : "not known");

/** Shows a value with its confidence interval on one line; without the interval if all three look equal. */
function between(part, name) {
  const value = part?.[name];
  if (!isNumber(value)) return "not known";
  const [told, low, high] = [value, part.low, part.high].map(percent);
  const hasRange = isNumber(part.low) && isNumber(part.high) && !(low === told && high === told);
  return el("span", {}, told, hasRange ? el("span", { class: "muted range" }, ` (${low} to ${high})`) : "");
}

/** Names a group: entities by the length of their history, items by whether they are among the defaults. */
function band(name) {
  const told = name === "none" ? "no history" : /^\d/.test(name) ? `${name} in history` : `${name} item`;
  return el("span", { class: "unbroken" }, told);
}

const whence = (row) => el("span", { class: "gloss" },
  [row.source, row.producer].filter(Boolean).join(", "), row.band ? [", ", band(row.band)] : null);
const inTable = (value) => (value === "not known" ? unknown() : value);
const error = (part) => (isNumber(part?.mean) ? `${count(part.mean)}, p99 below ${count(part.p99)}` : "not known");

function drift({ drift: isFound, drifted }) {
  if (typeof isFound !== "boolean") return "not known";
  const tables = Array.isArray(drifted) && drifted.length ? ` in ${drifted.join(", ")}` : "";
  return isFound ? mark("bad", `found${tables}`) : mark("ok", "none found");
}

function sampled() {
  const part = panel("quality", "Answers computed again", 12);
  const [told, place] = [el("div"), el("div")];
  part.body.append(told, place);
  return (data) => {
    const quality = data.quality;
    if (!quality) {
      part.lede("Not known yet: no served answer has been computed again to compare.");
      told.replaceChildren();
      place.replaceChildren();
      return;
    }
    const { by } = quality;
    const since = quality.since === null || quality.since === undefined ? "" : ` since ${clock(quality.since, "day")}`;
    part.lede(quality.sentence ?? `${count(quality.samples)} samples${since}.`);
    replace(told, facts([
      ["Drift", drift(quality)],
      ["Items in common", between(quality.overlap, "mean")],
      ["Identical", between(quality.exact, "rate")],
      ["Mean error of scores", error(quality.score_error)],
      ["Age when served", known(quality.age_s, duration)],
      ["Samples", isNumber(quality.samples) ? `${count(quality.samples)}${since}` : "not known"],
      ["Cold ids for the next night", known(quality.worklist, count)],
      ["Read at least once", isNumber(quality.read_share) ? `${percent(quality.read_share)} of the generation` : "not known"],
      ["Hits per gigabyte", known(quality.hits_per_gb, count)],
    ]));
    const rows = Array.isArray(by) ? by.filter(Boolean) : [];
    if (!rows.length) place.replaceChildren();
    else {
      replace(place, table("Agreement by table, source, producer, and history or popularity",
        ["Answers", "Samples", "Items in common", "Identical", "Age"],
        rows.map((row) => [
          el("span", {}, shown(row.table), " ", whence(row)), count(row.samples),
          inTable(between(row.overlap, "mean")), inTable(between(row.exact, "rate")), duration(row.age_s),
        ])));
    }
  };
}

function conditions(replica) {
  const level = { stale: "warn", degraded: "warn", failed: "bad" };
  const found = Object.keys(level)
    .filter((name) => replica[name])
    .map((name) => mark(level[name], typeof replica[name] === "string" ? `${name}: ${words(replica[name])}` : name));
  if (replica.ready === false) found.unshift(mark("bad", "not ready"));
  else if (replica.ready === true) found.unshift(mark("ok", "ready"));
  return found.length ? el("span", { class: "several" }, found) : "not known";
}

const isTroubled = (each) => each.ready === false || Boolean(each.failed || each.stale || each.degraded);

function replicas() {
  const part = panel("replicas", "Who answers", 12);
  const place = el("div");
  part.body.append(place);
  return (data) => {
    const all = Array.isArray(data.replicas) ? data.replicas.filter(Boolean) : [];
    all.sort((left, right) => isTroubled(right) - isTroubled(left));
    const live = new Set(all.map((each) => each.generation ?? null));
    part.lede(!all.length ? "No replica has reported yet."
      : `${all.length} reported; ${live.size > 1 ? `they answer from ${live.size} different generations` : "all answer from one generation"}.`);
    if (!all.length) place.replaceChildren();
    else {
      replace(place, table("Replicas, each with its state", ["Replica", "State", "Generation", "Workers", "Epoch", "Last report"],
        all.map((each) => [
          el("code", {}, shown(each.replica)), conditions(each), el("code", {}, shown(each.generation)),
          Array.isArray(each.workers) ? count(each.workers.length) : shown(each.workers), isNumber(each.epoch) ? String(each.epoch) : "–",
          isNumber(each.seen_s) ? `${duration(Math.round(each.seen_s))} ago` : "not known",
        ])));
    }
  };
}

const ratio = (value) => (isNumber(value) ? value.toPrecision(3) : "not known");

/** Shows an arm's events: their number, and their rate per request relative to the control's, with its bounds. */
function reported(events) {
  const rows = Object.entries(events ?? {});
  if (!rows.length) return "none";
  return el("span", { class: "several" }, rows.map(([event, told]) =>
    el("span", {}, `${words(event)} ${count(told?.count)}`, isNumber(told?.ratio?.ratio)
      ? el("span", { class: "muted range" }, ` × ${ratio(told.ratio.ratio)} (${ratio(told.ratio.low)} to ${ratio(told.ratio.high)})`) : "")));
}

function experiments() {
  const part = panel("quality", "Experiments", 12);
  const place = el("div");
  part.body.append(place);
  return (data) => {
    const all = Array.isArray(data.experiments) ? data.experiments.filter(Boolean) : [];
    part.node.hidden = !all.length;
    if (!all.length) return;
    part.lede("Requests and events since the start of each worker that runs; larder experiment status has all of them.");
    replace(place, table("Arms of experiments", ["Arm", "Share", "Generation", "Requests", "Events, per request over the control's"],
      all.flatMap((each) => (each.arms ?? []).filter(Boolean).map((arm) => [
        el("span", {}, shown(each.experiment), " = ", shown(arm.arm), el("span", { class: "gloss" }, each.started_at === null ? " held ready" : "")),
        isNumber(arm.share * each.share) ? percent(arm.share * each.share) : "not known",
        el("code", {}, shown(arm.generation)), count(arm.requests), reported(arm.events),
      ]))));
  };
}

/** Returns the panels of quality, experiments and replicas, each as a function that draws it. */
export const quality = () => [sampled(), experiments(), replicas()];
