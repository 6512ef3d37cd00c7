// The age of the data, the generations with their gates, and the durations of the nights.

import { described } from "./chart.js";
import { copies } from "./copies.js";
import { el, keyed, say, svg, unknown } from "./dom.js";
import { bytes, clock, count, duration, instant, isNumber, shown, stamp, words } from "./format.js";
import { facts, mark, panel, replace, table, tabular } from "./panel.js";
import { linear } from "./scale.js";
import { sum } from "./series.js";

const list = (value) => (Array.isArray(value) ? value.filter((each) => each && typeof each === "object") : []);

function strip(now, until, due, width) {
  const x = linear([Math.min(until, due ?? until), now], [7, width - 7]);
  const anchor = (at) => (x(at) > width - 90 ? "end" : x(at) < 90 ? "start" : "middle");
  return svg("svg", { class: "canvas", height: 66, viewBox: `0 0 ${width} 66`, role: "img",
    "aria-label": `Data until ${clock(until, "day")}; ${due === null ? "" : `due since ${clock(due, "day")}; `}now ${clock(now, "day")}.` },
    svg("line", { class: "rail", x1: 7, x2: width - 7, y1: 32, y2: 32 }),
    svg("line", { class: "age", x1: x(until), x2: x(now), y1: 32, y2: 32 }),
    svg("circle", { class: "dot", cx: x(until), cy: 32, r: 5 }),
    svg("text", { class: "mark", x: x(until), y: 16, "text-anchor": anchor(until) }, `data until ${clock(until, "day")}`),
    x(now) - x(until) < 300 ? null
      : svg("text", { class: "mark", x: x(now), y: 16, "text-anchor": "end" }, `now ${clock(now, "day")}`),
    due === null ? null : svg("path", { class: "due", d: `M${x(due)} 24v16` }),
    due === null ? null : svg("text", { class: "mark", x: x(due), y: 58, "text-anchor": anchor(due) }, `due since ${clock(due, "day")}`));
}

function freshness() {
  const part = panel("nights", "Freshness", 12);
  const [figure, told] = [el("div"), el("div")];
  part.body.append(figure, told);
  let draw = () => {};
  new ResizeObserver(() => draw()).observe(part.body);
  return (data) => {
    const { age_s: age, due_at: due, missing } = data.schedule ?? {};
    const now = instant(data.now);
    const live = list(data.generations).find((each) => each.role === "live" || each.state === "live");
    const until = isNumber(age) && now !== null ? now - age : instant(live?.data_until);
    part.lede(until === null ? "No generation is served yet, or the age of its data is not known."
      : `The served answers were computed from data that are ${duration(now - until)} old.`);
    draw = () => {
      const width = Math.floor(part.body.getBoundingClientRect().width);
      if (until === null || now === null || !width) figure.replaceChildren();
      else replace(figure, strip(now, until, instant(due), width));
    };
    draw();
    replace(told, facts([
      ["Schedule", { true: mark("bad", "a generation is missing"), false: mark("ok", "on schedule") }[String(missing)] ?? "not known"],
      ["Served generation", live ? el("code", {}, shown(live.generation)) : "not known"],
      ["Published", stamp(live?.published_at)],
      ["Must be newer than the tick of", stamp(due)],
    ]));
  };
}

// Age in seconds from which the table shows its age.
const OLD_S = 20;
const LEVELS = { live: "ok", verified: "ok", refused: "bad", rolled_back: "warn", abandoned: "warn" };

function verdictOf(gate) {
  const word = typeof gate.verdict === "boolean" ? (gate.verdict ? "passed" : "failed") : gate.verdict;
  if (word === null || word === undefined) return { level: "quiet", word: "not known" };
  if (/^(pass|ok)/i.test(word)) return { level: "ok", word };
  return { level: /^(overrid|warn|skip|not)/i.test(word) ? "warn" : "bad", word };
}

function judged(gates) {
  if (!gates.length) return "no gates";
  const failed = gates.filter((gate) => verdictOf(gate).level === "bad").length;
  if (failed) return mark("bad", `${failed} of ${gates.length} gates failed`);
  const unjudged = gates.filter((gate) => gate.value === null).length; // nothing to judge by
  return mark("ok", `${gates.length - unjudged} gates passed${unjudged ? `, ${unjudged} not judged` : ""}`);
}

function opened(generation) {
  const gates = list(generation.gates);
  return el("div", {},
    facts([
      ["Data until", stamp(generation.data_until)],
      ["Records", isNumber(generation.records) ? count(generation.records) : unknown()],
      ["Epoch", isNumber(generation.epoch) ? String(generation.epoch) : unknown()],
      generation.reason ? ["Reason", shown(generation.reason)] : null,
      ...list(generation.remarks).map((remark) => ["Remark", shown(remark)]),
    ]),
    gates.length
      ? table(`Gates of ${generation.generation}`, ["Rule", "Measured", "Threshold", "Verdict"],
        gates.map((gate) => {
          const { level, word } = verdictOf(gate);
          const rule = el("span", {}, words(gate.rule ?? "–"), gate.note ? el("span", { class: "gloss" }, String(gate.note)) : null);
          return [rule, shown(gate.value), shown(gate.threshold), mark(level, words(word))];
        }))
      : el("p", { class: "lede" }, "No gate has judged it yet."));
}

function generations() {
  const part = panel("nights", "Generations", 12);
  const head = el("p", { class: "generation columns", "aria-hidden": "true" },
    ["Generation", "State", "Published", "Size", "Gates"].map((name) => el("span", {}, name)));
  const rows = el("ul", { class: "generations" });
  part.body.append(head, rows);
  return (data) => {
    const all = list(data.generations);
    head.hidden = !all.length;
    const age = instant(data.now) - (instant(data.generations_at) ?? instant(data.now));
    const asOf = age >= OLD_S ? ` As of ${duration(age)} ago.` : "";
    const none = data.generations_at === null ? "The store has not been read yet." : `No generation is known yet.${asOf}`;
    part.lede(all.length ? `${all.length} known; open one for its gates.${asOf}` : none);
    keyed(rows, all, {
      key: (each) => each.generation,
      make: () => el("li", {}, el("details", {}, el("summary", { class: "generation" }), el("div", { class: "opened" }))),
      update: (node, each) => {
        const [summary, place] = node.firstChild.children;
        const state = shown(each.state);
        const role = each.role && each.role !== each.state ? ` · ${words(each.role)}` : "";
        const line = [
          el("code", {}, shown(each.generation)),
          typeof state === "string" ? mark(LEVELS[state] ?? "quiet", words(state) + role) : state,
          each.published_at === null || each.published_at === undefined ? el("span", { class: "muted" }, "not published")
            : stamp(each.published_at),
          isNumber(each.bytes) ? bytes(each.bytes) : unknown(),
          judged(list(each.gates)),
        ].map((cell) => el("span", {}, cell));
        const built = el("span", { class: "line" }, line);
        if (!summary.firstChild?.isEqualNode(built)) summary.replaceChildren(built);
        replace(place, opened(each));
      },
    });
  };
}

const MOST_TONES = 7;

function steps() {
  const part = panel("nights", "The last nights, by step", 12);
  const rows = el("ul", { class: "nights" });
  const legend = el("ul", { class: "legend" });
  part.body.append(rows, legend);
  const tell = tabular(part.body, part.title, ({ nights, names }) =>
    table("Duration of each step of the last nights", ["Night", "Outcome", ...names.map(words), "In all"],
      nights.map((night) => [
        stamp(night.began_at), shown(night.outcome),
        ...names.map((name) => duration(timeOf(night, name))), duration(total(night)),
      ])));
  return (data) => {
    const nights = list(data.nights).slice(0, 10);
    const names = [...new Set(nights.flatMap((night) => list(night.steps).map((step) => String(step.step))))];
    const spent = (name) => sum(nights.map((night) => timeOf(night, name))) ?? 0;
    const toned = [...names].sort((left, right) => spent(right) - spent(left)).slice(0, MOST_TONES);
    const tone = (name) => (toned.includes(name) ? `n${names.filter((each) => toned.includes(each)).indexOf(name) + 1}` : "rest");
    const longest = Math.max(0, ...nights.map((night) => total(night) ?? 0));
    part.lede(nights.length ? lastNight(nights[0]) : "No night has run yet.");
    keyed(rows, nights, {
      key: (night, index) => `${night.generation} ${night.began_at ?? index}`,
      make: () => el("li"),
      update: (node, night) => replace(node, lane(night, names, tone, longest)),
    });
    const told = toned.length < names.length ? [...names.filter((name) => toned.includes(name)), null] : names;
    replace(legend, el("li", { class: "inner" }, told.map((name) =>
      el("span", { class: "entry" }, el("span", { class: `swatch tone-${name === null ? "rest" : tone(name)}` }),
        el("span", { class: "name" }, name === null ? "shorter steps" : words(name))))));
    legend.hidden = !names.length;
    tell({ nights, names }, nights.length);
  };
}

const timeOf = (night, name) =>
  sum(list(night.steps).filter((step) => String(step.step) === name).map((step) => step.seconds));
const total = (night) => sum(list(night.steps).map((step) => step.seconds));

function lastNight(night) {
  const seconds = total(night);
  return `The newest took ${seconds === null ? "an unknown time" : duration(seconds)}: ${words(night.outcome ?? "outcome not known")}.`;
}

function lane(night, names, tone, longest) {
  const lane = el("span", { class: "lane", role: "img",
    "aria-label": described("Steps", names.map((name) => ({ label: words(name), told: duration(timeOf(night, name)) }))) });
  for (const name of names) {
    const seconds = timeOf(night, name);
    if (!(seconds > 0 && longest > 0)) continue;
    const piece = el("span", { class: `piece tone-${tone(name)}`, title: `${words(name)}: ${duration(seconds)}` });
    piece.style.width = `${(seconds / longest) * 100}%`;
    lane.append(piece);
  }
  const level = /publish|live|done|ok|succ/i.test(night.outcome ?? "") ? "ok" : night.outcome ? "warn" : "quiet";
  return el("span", { class: "night" },
    el("span", { class: "when" }, stamp(night.began_at)),
    el("span", { class: "outcome" }, mark(level, words(night.outcome ?? "not known"))),
    lane, el("span", { class: "value" }, duration(total(night))));
}

/** Returns all panels of this section, each as a function that draws it. */
export const nights = () => [freshness(), generations(), steps(), copies()];
