// Memory of Redis and of L1, and the predicted effect of another size of L1.

import { el, svg } from "./dom.js";
import { bytes, count, isNumber, percent, shown } from "./format.js";
import { bar, facts, panel, replace, table, tabular } from "./panel.js";
import { linear, logarithmic } from "./scale.js";

function redis() {
  const part = panel("memory", "Redis", 4);
  const [figure, told] = [el("div"), el("div")];
  part.body.append(figure, told);
  return (data) => {
    const { used_bytes: used, limit_bytes: limit, policy, clients, evicted } = data.redis ?? {};
    const isLimited = isNumber(used) && limit > 0;
    part.lede(!isNumber(used) ? "Redis does not answer, or was not asked yet."
      : isLimited ? `${bytes(used)} of ${bytes(limit)} used, ${bytes(Math.max(0, limit - used))} left.`
        : `${bytes(used)} used, no limit set.`);
    const share = isLimited ? used / limit : 0;
    replace(figure, el("div", { hidden: !isLimited }, bar(share, share > 0.9 ? "bad" : share > 0.75 ? "warn" : "accent")));
    replace(told, facts([
      isLimited || !isNumber(used) ? ["In use", isLimited ? percent(share) : "not known"] : null,
      ["When full", shown(policy)],
      ["Evicted", isNumber(evicted) ? count(evicted) : "not known"],
      ["Connections", isNumber(clients) ? count(clients) : "not known"],
    ]));
  };
}

const [LEFT, TOP, BOTTOM, HEIGHT] = [52, 8, 22, 190];

function curve(points, budget, hit, width) {
  const sizes = [...points.map((point) => point.bytes), budget].filter((size) => size > 0);
  const domain = [Math.min(...sizes), Math.max(...sizes)];
  if (domain[0] === domain[1]) domain[1] *= 2;
  const x = logarithmic(domain, [LEFT, width - 10]);
  const y = linear([0, 1], [HEIGHT - BOTTOM, TOP]);
  const d = points.map((point, index) => `${index ? "L" : "M"}${x(point.bytes).toFixed(1)} ${y(point.hit_ratio).toFixed(1)}`).join("");
  const marks = [domain[0], Math.sqrt(domain[0] * domain[1]), domain[1]];
  const anchors = ["start", "middle", "end"];
  const hasBudget = budget > 0;
  // The curve rises, so the label has room above the curve to the left of the budget, and below it to the right.
  const isLeft = hasBudget && x(budget) > width / 2;
  const label = isLeft && !(hit > 0.85) ? TOP + 14 : HEIGHT - BOTTOM - 8;
  return svg("svg", { class: "canvas", height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
    "aria-label": `Hit ratio by size of L1, from ${bytes(domain[0])} to ${bytes(domain[1])}.${hasBudget ? ` L1 has ${bytes(budget)} now: ${percent(hit)}.` : ""}` },
    [0, 0.5, 1].map((mark) => [
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(mark), y2: y(mark) }),
      svg("text", { class: "mark", x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, percent(mark)),
    ]).flat(),
    marks.map((mark, index) => svg("text", { class: "mark", x: x(mark), y: HEIGHT - 4, "text-anchor": anchors[index] }, bytes(mark))),
    hasBudget ? svg("line", { class: "budget", x1: x(budget), x2: x(budget), y1: TOP, y2: HEIGHT - BOTTOM }) : null,
    svg("path", { class: "line tone-accent is-bold", d }),
    hasBudget && isNumber(hit) ? svg("circle", { class: "dot", cx: x(budget), cy: y(hit), r: 5 }) : null,
    hasBudget ? svg("text", { class: "mark strong", x: x(budget) + (isLeft ? -8 : 8), y: label,
      "text-anchor": isLeft ? "end" : "start" }, `now ${bytes(budget)}`) : null);
}

function advisor() {
  const part = panel("memory", "Size of L1", 8);
  const [figure, told] = [el("div"), el("div")];
  part.body.append(figure, told);
  let draw = () => {};
  new ResizeObserver(() => draw()).observe(part.body);
  const tell = tabular(part.body, part.title, (points) =>
    table("Hit ratio by size of L1", ["Size", "Entries", "Hit ratio"],
      points.map((point) => [bytes(point.bytes), count(point.entries), percent(point.hit_ratio)])));
  return (data) => {
    const { advisor: advice, l1 } = data;
    const points = (Array.isArray(advice?.curve) ? advice.curve : [])
      .filter((point) => point && point.bytes > 0 && isNumber(point.bytes) && isNumber(point.hit_ratio))
      .sort((left, right) => left.bytes - right.bytes);
    const budget = advice?.budget_bytes ?? l1?.budget_bytes ?? null;
    part.lede(advice?.sentence ? `${advice.sentence}. Each worker has an L1 of this size for itself.` : "The effect of another size is not known yet.");
    draw = () => {
      const width = Math.floor(part.body.getBoundingClientRect().width);
      if (points.length < 2 || !width) figure.replaceChildren();
      else replace(figure, curve(points, budget, advice.hit_ratio, width));
    };
    draw();
    replace(told, facts([
      ["In use by all workers", isNumber(l1?.bytes) ? `${bytes(l1.bytes)} of ${bytes(l1.budget_bytes)}` : "not known"],
      ["Entries of all workers", isNumber(l1?.entries) ? count(l1.entries) : "not known"],
      advice ? ["Sampled", `${count(advice.sampled)} ids, ${percent(advice.sampling_rate)} of all`] : null,
    ]));
    tell(points, points.length);
  };
}

/** Returns all panels of this section, each as a function that draws it. */
export const memory = () => [redis(), advisor()];
