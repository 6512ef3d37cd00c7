// Charts over time as plain SVG: stacked areas, or lines. All charts show the values at the pointer's time.

import { el, keyed, say, svg } from "./dom.js";
import { clock, DASH, isNumber } from "./format.js";
import { decades, linear, logarithmic, roundUp, ticks, timeTicks } from "./scale.js";

const TOP = 8;
const BOTTOM = 20;
const EMPTY = 44;
const SHORTEST_S = 180;
const charts = new Set();
let pointed = null;

function pointAll(at) {
  pointed = at;
  for (const chart of charts) chart.point();
}

/** One chart with its legend. `draw` takes the data; the chart is drawn again whenever its width changes. */
export class TimeChart {
  /** `format`: formats a value. `kind`: stack or lines. `log`: whether the axis is logarithmic. */
  constructor({ kind, format, height = 160, left = 52, log = false, legend = true }) {
    Object.assign(this, { kind, format, height, left, log });
    this.canvas = svg("svg", { role: "img", class: "canvas", height });
    this.legend = legend ? el("ul", { class: "legend" }) : null;
    this.node = el("div", { class: "chart" }, this.canvas, this.legend);
    this.canvas.addEventListener("pointermove", (event) => this.#follow(event));
    this.canvas.addEventListener("pointerleave", () => pointAll(null));
    new ResizeObserver(() => this.#paint()).observe(this.node);
    charts.add(this);
  }

  /** `lines`: [{name, label, tone, values, told, isApart}]; `high`: top of the axis, by default from the values. */
  draw(shown) {
    this.shown = shown;
    this.#paint();
  }

  /** Shows the values at the time pointed at, or else the newest ones. */
  point() {
    if (!this.x) return;
    const { at: bins, step } = this.shown;
    const bin = pointed === null ? -1 : bins.findIndex((start) => pointed >= start && pointed < start + step);
    this.cursor.setAttribute("visibility", bin < 0 ? "hidden" : "visible");
    if (bin >= 0) {
      const x = this.x(bins[bin] + step / 2);
      this.cursor.setAttribute("transform", `translate(${x.toFixed(1)} 0)`);
      say(this.flag, clock(bins[bin], step < 60 ? "second" : "minute"));
      this.flag.setAttribute("text-anchor", x > this.width - 60 ? "end" : "start");
      this.flag.setAttribute("x", x > this.width - 60 ? -5 : 5);
    }
    this.#tell(bin);
  }

  #follow(event) {
    if (!this.x) return;
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    const { domain } = this;
    const share = (x - this.left) / (this.width - this.left - 1);
    pointAll(share < 0 || share > 1 ? null : domain[0] + share * (domain[1] - domain[0]));
  }

  #tell(bin) {
    if (!this.legend) return;
    keyed(this.legend, this.shown.lines, {
      key: (line) => line.name,
      make: (line) =>
        el("li", {}, el("span", { class: `swatch tone-${line.tone}${line.isApart ? " is-apart" : ""}` }),
          el("span", { class: "name" }, line.label), el("span", { class: "value" })),
      update: (node, line) =>
        say(node.lastChild, bin < 0 ? line.told : this.format(line.values[bin] ?? null)),
    });
  }

  #paint() {
    const width = Math.floor(this.canvas.getBoundingClientRect().width);
    if (!this.shown || !width) return;
    const { at, step, lines, summary } = this.shown;
    this.width = width;
    const isEmpty = !at.length || !lines.some((line) => line.values.some(isNumber));
    const height = isEmpty ? EMPTY : this.height;
    this.canvas.setAttribute("height", height);
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.canvas.setAttribute("aria-label", summary);
    if (isEmpty) {
      this.x = null;
      this.canvas.replaceChildren(
        svg("line", { class: "grid", x1: 0, x2: width, y1: EMPTY - 1, y2: EMPTY - 1 }),
        svg("text", { class: "mark", y: EMPTY - 14 }, "Nothing to draw yet"),
      );
      this.legend?.replaceChildren();
      if (this.legend) this.legend.keyedChildren = undefined;
      return;
    }
    const beyond = at[at.length - 1] + step;
    this.domain = [Math.min(at[0], beyond - SHORTEST_S), beyond];
    this.x = linear(this.domain, [this.left, width - 1]);
    const stacked = this.kind === "stack" ? heaped(lines) : lines;
    const { y, marks } = this.#vertical(stacked);
    this.flag = svg("text", { class: "flag", y: TOP + 4 });
    this.cursor = svg("g", { class: "cursor", visibility: "hidden" },
      svg("line", { y1: TOP, y2: this.height - BOTTOM }), this.flag);
    this.canvas.replaceChildren(
      ...this.#frame(y, marks),
      ...stacked.map((line) => (line.base ? this.#area(line, y) : this.#line(line, y))),
      this.cursor,
    );
    this.point();
  }

  #vertical(lines) {
    const values = lines.flatMap((line) => line.tops ?? line.values).filter(isNumber);
    const range = [this.height - BOTTOM, TOP];
    if (this.log) {
      const marks = this.shown.decades ?? decades(...extent(values.filter((value) => value > 0)));
      return { y: logarithmic([marks[0], marks[marks.length - 1]], range), marks };
    }
    const high = this.shown.high ?? roundUp(extent(values)[1]);
    return { y: linear([0, high], range), marks: ticks(high) };
  }

  #frame(y, marks) {
    const room = this.width - this.left;
    const times = timeTicks(this.domain, Math.max(2, Math.floor(room / 76)));
    return [
      ...marks.flatMap((mark) => [
        svg("line", { class: "grid", x1: this.left, x2: this.width, y1: y(mark), y2: y(mark) }),
        svg("text", { class: "mark", x: this.left - 8, y: y(mark) + 4, "text-anchor": "end" },
          mark === 0 ? "0" : this.format(mark)),
      ]),
      ...times
        .filter((at) => this.x(at) > this.left + 16 && this.x(at) < this.width - 16)
        .map((at) => svg("text", { class: "mark", x: this.x(at), y: this.height - 4, "text-anchor": "middle" },
          clock(at))),
    ];
  }

  /** Whether bins are wide enough to draw steps; narrower ones are drawn as lines through their middles. */
  #isStepped() {
    const { at, step } = this.shown;
    return this.x(at[0] + step) - this.x(at[0]) > 6;
  }

  #line(line, y) {
    const { at, step } = this.shown;
    const { values } = line;
    const isStepped = this.#isStepped();
    let d = "";
    values.forEach((value, bin) => {
      if (!isNumber(value)) return;
      const [hasLeft, hasRight] = [isNumber(values[bin - 1]), isNumber(values[bin + 1])];
      const middle = this.x(at[bin] + step / 2);
      // A single value is drawn as a dash, because a point would be invisible.
      const half = isStepped ? (this.x(at[bin] + step) - this.x(at[bin])) / 2 : hasLeft || hasRight ? 0 : 2;
      d += `${hasLeft ? "L" : "M"}${(middle - half).toFixed(1)} ${y(value).toFixed(1)}h${(2 * half).toFixed(1)}`;
    });
    return svg("path", { class: `line tone-${line.tone}${line.isApart ? " is-apart" : ""}`, d });
  }

  #area(line, y) {
    const { at, step } = this.shown;
    const place = (time) => this.x(time).toFixed(1);
    const isStepped = this.#isStepped();
    let d = "";
    for (let first = 0; first < at.length; first += 1) {
      if (!isNumber(line.tops[first])) continue;
      let upper = "";
      let lower = "";
      let bin = first;
      for (; bin < at.length && isNumber(line.tops[bin]); bin += 1) {
        const [left, right] = isStepped ? [at[bin], at[bin] + step].map(place) : [place(at[bin] + step / 2), ""];
        upper += `${upper ? "L" : "M"}${left} ${y(line.tops[bin]).toFixed(1)}${right && `H${right}`}`;
        lower = `L${right || left} ${y(line.base[bin]).toFixed(1)}${right && `H${left}`}${lower}`;
      }
      d += `${upper}${lower}Z`;
      first = bin;
    }
    return svg("path", { class: `area tone-${line.tone}`, d });
  }
}

/** Stacks each line on those before it, except lines with `isApart`. */
function heaped(lines) {
  let base = null;
  return lines.map((line) => {
    if (line.isApart) return line;
    const below = base ?? line.values.map(() => 0);
    const tops = line.values.map((value, bin) => (isNumber(value) ? below[bin] + value : null));
    base = tops.map((top, bin) => top ?? below[bin]);
    return { ...line, base: below, tops };
  });
}

/** Smallest and largest value. */
export function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

/** Describes a chart in one sentence for screen readers. */
export const described = (title, lines) =>
  `${title}: ${lines.map((line) => `${line.label} ${line.told === DASH ? "not known" : line.told}`).join(", ")}.`;
