// The few numbers under the verdict.

import { el, keyed, say } from "./dom.js";
import { bytes, count, DASH, duration, isNumber, percent, rate } from "./format.js";
import { last, recent, recentAnswers, storedShare, sum } from "./series.js";

function served(series) {
  const { total } = recentAnswers(series);
  const note = total === null ? "no answers yet" : `of ${count(total)} answers in 5 min`;
  return { name: "From memory or Redis", value: percent(storedShare(series)), note };
}

function asked(data, series) {
  const bins = recent(series, series.requests, 60);
  const requests = sum(bins);
  const total = data.totals?.requests;
  return {
    name: "Requests",
    value: rate(requests === null ? null : requests / (bins.length * series.step)),
    note: isNumber(total) ? `${count(total)} since the start` : "in the last minute",
  };
}

function slow(data, series) {
  const p99 = (source) =>
    data.lately?.latency?.[source]?.p99 ?? last(recent(series, series.seconds[source]?.p99 ?? []));
  const others = [["L2", p99("l2")], ["live", p99("live")]].filter(([, value]) => value !== null);
  const note = others.map(([name, value]) => `${name} ${duration(value)}`).join(", ");
  return { name: "p99 from L1", value: duration(p99("l1")), note: note || "none from L2 or live" };
}

function fresh(data) {
  const schedule = data.schedule ?? {};
  const due = { true: "a generation is missing", false: "on schedule" }[String(schedule.missing)];
  return { name: "Age of the data", value: duration(schedule.age_s), note: due ?? "schedule not known" };
}

function room(data) {
  const { used_bytes: used, limit_bytes: limit } = data.redis ?? {};
  if (!(isNumber(used) && limit > 0)) {
    return { name: "Redis memory", value: bytes(used), note: isNumber(used) ? "no limit set" : "Redis not asked yet" };
  }
  return { name: "Redis memory", value: percent(used / limit), note: `${bytes(used)} of ${bytes(limit)}` };
}

function right(data) {
  const { exact, overlap, samples } = data.quality ?? {};
  const note = samples > 0 ? `${percent(exact?.rate)} identical, of ${count(samples)}` : "nothing checked yet";
  return { name: "Agrees with the model", value: percent(overlap?.mean), note };
}

/** Returns the function that draws the list of figures. */
export function figures() {
  const node = document.getElementById("figures");
  return (data, series) => {
    const all = [served(series), asked(data, series), slow(data, series), fresh(data), room(data), right(data)];
    keyed(node, all, {
      key: (each) => each.name,
      make: (each) => el("div", {}, el("dt", {}, each.name), el("dd", {}, el("span", { class: "big" }), el("span", { class: "note" }))),
      update: (each, { value, note }) => {
        const [big, small] = each.lastChild.children;
        say(big, value === DASH ? "not known" : value);
        big.classList.toggle("is-unknown", value === DASH);
        say(small, note);
      },
    });
  };
}
