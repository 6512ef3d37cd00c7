// How right the served answers are, and who serves them.

import { el } from "./dom.js";
import { clock, count, duration, exact, isNumber, percent, shown, words } from "./format.js";
import { facts, mark, panel, replace, table } from "./panel.js";

const known = (value, show) => (isNumber(value) ? show(value) : "not known");

/** A value with its confidence interval. */
function between(part, name) {
  const value = part?.[name];
  if (!isNumber(value)) return "not known";
  const range = isNumber(part.low) && isNumber(part.high) ? el("span", { class: "muted" }, ` (${percent(part.low)} to ${percent(part.high)})`) : "";
  return el("span", {}, percent(value), range);
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
    const { score_error: error, by } = quality;
    const since = quality.since === null || quality.since === undefined ? "" : ` since ${clock(quality.since, "day")}`;
    part.lede(quality.sentence ?? `${count(quality.samples)} samples${since}.`);
    replace(told, facts([
      ["Drift", quality.drift === true ? mark("bad", "found") : quality.drift === false ? mark("ok", "none found") : "not known"],
      ["Exactly right", between(quality.exact, "rate")],
      ["Overlap of lists", between(quality.overlap, "mean")],
      ["Error of scores", isNumber(error?.mean) ? `${exact(error.mean)} mean, ${exact(error.p99)} p99` : "not known"],
      ["Samples", isNumber(quality.samples) ? `${count(quality.samples)}${since}` : "not known"],
      ["Cold ids for the next night", known(quality.worklist, count)],
      ["Read at least once", isNumber(quality.read_share) ? `${percent(quality.read_share)} of the generation` : "not known"],
    ]));
    const rows = Array.isArray(by) ? by.filter(Boolean) : [];
    if (!rows.length) place.replaceChildren();
    else {
      replace(place, table("Agreement by source, table and popularity", ["Source", "Table", "Popularity", "Samples", "Exactly right", "Overlap"],
        rows.map((row) => [shown(row.source), shown(row.table), shown(row.band), count(row.samples), percent(row.exact), percent(row.overlap)])));
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
    part.lede(!all.length ? "No replica has told of itself yet."
      : `${all.length} told of themselves; ${live.size > 1 ? `they answer from ${live.size} different generations` : "all answer from one generation"}.`);
    if (!all.length) place.replaceChildren();
    else {
      replace(place, table("Replicas", ["Replica", "State", "Generation", "Workers", "Epoch", "Heard from"],
        all.map((each) => [
          el("code", {}, shown(each.replica)), conditions(each), el("code", {}, shown(each.generation)),
          Array.isArray(each.workers) ? count(each.workers.length) : shown(each.workers), isNumber(each.epoch) ? String(each.epoch) : "–",
          isNumber(each.seen_s) ? `${duration(Math.round(each.seen_s))} ago` : "not known",
        ])));
    }
  };
}

/** The panels of quality and of replicas, each a function that draws. */
export const quality = () => [sampled(), replicas()];
