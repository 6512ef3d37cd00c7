// Events accepted since the night: how many there are, where they are stored, and which answers they change.

import { described, TimeChart } from "./chart.js";
import { el, keyed, say } from "./dom.js";
import { bytes, count, duration, isNumber, percent, rate, stamp, words } from "./format.js";
import { bar, facts, mark, panel, replace, table, tabular, timed } from "./panel.js";
import { last, rows, span, sum } from "./series.js";

const RESULTS = [["accepted", "accepted", "n1"], ["repeated", "repeated", "n2"], ["rejected", "rejected", "n4"]];
const known = (value, show) => (isNumber(value) ? show(value) : "not known");
const object = (value) => (value && typeof value === "object" ? value : {});

/** Names and numbers of a part of the document, largest first, without zeros. */
const counts = (part) => Object.entries(object(part)).filter(([, n]) => isNumber(n) && n > 0).sort((left, right) => right[1] - left[1]);

/** Shows a position of Redis, such as 1769860800391-4, as its time, followed by the position itself. */
function position(value, fine) {
  const found = /^(\d{1,13})-\d{1,7}$/.exec(String(value ?? ""));
  if (!found) return "not known";
  if (Number(found[1]) === 0) return "none yet";
  return el("span", {}, stamp(Number(found[1]) / 1000, fine), el("span", { class: "gloss" }, String(value)));
}

/** Shows bytes in use and their limit, with a bar. */
function part(of, most) {
  if (!isNumber(of)) return "not known";
  if (!(most > 0)) return bytes(of);
  const share = of / most;
  return el("span", {}, `${bytes(of)} of ${bytes(most)}`, bar(share, share > 0.9 ? "bad" : share > 0.8 ? "warn" : "accent"));
}

function taken() {
  const found = panel("events", "Events per second", 8);
  const chart = new TimeChart({ kind: "stack", format: rate, height: 190 });
  found.body.append(chart.node);
  const tell = tabular(found.body, found.title, (series) =>
    table("Events by time", ["From", ...RESULTS.map(([, label]) => label)],
      timed(rows(series, RESULTS.map(([name]) => [series.events[name] ?? [], sum, count])))));
  return ({ events, lately }, series) => {
    if (!events) return;
    const results = object(events.results);
    const all = sum(Object.values(results));
    const seconds = lately?.seconds;
    found.lede(all === null ? "None in the last 5 minutes."
      : `${rate((results.accepted ?? 0) / (seconds > 0 ? seconds : 300))} accepted in the last 5 minutes, ${count(results.accepted ?? 0)} of ${count(all)}.`);
    const lines = RESULTS.map(([name, label, tone]) => {
      const values = (series.events[name] ?? series.at.map(() => 0)).map((each) => (each === null ? null : each / series.step));
      return { name, label, tone, values, told: rate(last(values)) };
    });
    chart.draw({ ...series, lines, summary: described(`Events per second over ${span(series)}`, lines) });
    tell(series, series.at.length);
  };
}

function answers() {
  const found = panel("events", "Events in answers", 4);
  const place = el("div");
  found.body.append(place);
  return ({ events }) => {
    if (!events) return;
    const { answers_share: share, list_change: change, lag_s: lag } = events;
    found.lede(isNumber(share) ? `${percent(share)} of the answers of the last 5 minutes count newer events.` : "No requests in the last 5 minutes.");
    replace(place, facts([
      ["Behind acceptance, slowest worker", known(lag, (value) => mark(value > 5 ? "bad" : value > 1 ? "warn" : "ok", duration(value)))],
      ["Answers with newer events", known(events.answers, count)],
      ["Share of their items not in the night's lists", known(change, percent)],
      ["Users with events", known(events.users, count)],
      ["Held by the fullest worker", part(events.held_bytes, events.held_max_bytes)],
    ]));
  };
}

function rejected() {
  const found = panel("events", "Why events were rejected", 4);
  const list = el("ol", { class: "bars" });
  found.body.append(list);
  return ({ events }) => {
    if (!events) return;
    const reasons = counts(events.results).filter(([name]) => name !== "accepted" && name !== "repeated");
    const refused = counts(events.refused);
    const told = [reasons.length ? null : "None in the last 5 minutes.",
      ...refused.map(([name, n]) => `Refused whole, ${count(n)} times: ${words(name)}.`)];
    found.lede(told.filter(Boolean).join(" ") || "In the last 5 minutes.");
    keyed(list, reasons, {
      key: ([name]) => name,
      make: ([name]) => el("li", {}, el("span", { class: "name" }, words(name)), el("span", { class: "value" }), el("span")),
      update: (node, [, n]) => {
        say(node.children[1], count(n));
        replace(node.children[2], bar(n / reasons[0][1], "accent"));
      },
    });
  };
}

function stream() {
  const found = panel("events", "Redis of events", 4);
  const place = el("div");
  found.body.append(place);
  return ({ events }) => {
    if (!events) return;
    const { up, durability, demanded, inbox_lag_seconds: waits } = events;
    found.lede(up === true ? "It answers, and keeps events as demanded."
      : events.writes_refused ? "It answers, but refuses to write: no events are accepted."
      : up === false ? "It cannot be reached, or is less durable than demanded: no events are accepted." : "It has not been checked yet.");
    replace(place, facts([
      ["Accepts events", up === true ? mark("ok", "yes") : up === false ? mark("bad", "no") : "not known"],
      ["Durability", durability ? `${durability}, demanded: ${demanded}` : "not known"],
      ["Stream", part(events.stream_bytes, events.stream_max_bytes)],
      ["Events in it", known(events.stream_length, count)],
      ["Waiting in the inbox", known(events.inbox_length, (n) =>
        mark(waits > 60 ? "warn" : "ok", n > 0 && isNumber(waits) ? `${count(n)}, for ${duration(waits)}` : count(n)))],
    ]));
  };
}

function positions() {
  const found = panel("events", "How far events have come", 4);
  const place = el("div");
  found.body.append(place);
  return ({ events }) => {
    if (!events) return;
    found.lede("The newest event that each of these includes, by the time of its acceptance.");
    replace(place, facts([
      ["Counted by every worker", position(events.counted_until, "second")],
      ["Taken over by a night", position(events.taken_until, "day")],
      ["Published in the live generation", position(events.published_until, "day")],
    ]));
  };
}

/** Returns all panels of this section, each as a function that draws it; the section is shown only if events are enabled. */
export function events() {
  const [section, link] = [document.getElementById("events"), document.querySelector('nav a[href="#events"]')];
  const shown = (data) => {
    section.hidden = link.hidden = !data.events;
  };
  return [shown, taken(), answers(), rejected(), stream(), positions()];
}
