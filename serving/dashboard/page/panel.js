// A panel: its heading, a summary in one line, its figure, and the figure's data as a table that can be opened.

import { el, say } from "./dom.js";
import { stamp } from "./format.js";

let ids = 0;

/** Appends a panel to the section of this id; `span` is its width in twelfths on a wide screen. */
export function panel(section, title, span) {
  const id = `panel-${(ids += 1)}`;
  const heading = el("h3", { id }, title);
  const lede = el("p", { class: "lede" });
  const body = el("div", { class: "body" });
  const node = el("article", { class: `panel span-${span}`, "aria-labelledby": id }, heading, lede, body);
  document.getElementById(section).append(node);
  return { node, body, title, lede: (text) => say(lede, (text ?? "").replace(/(\d) %/g, "$1\u00a0%")) };
}

/** A table with a caption; `head` names the columns, the first cell of each row names the row. */
export function table(caption, head, rows, { isCaptionSeen = false } = {}) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {},
      el("caption", { class: isCaptionSeen ? null : "unseen" }, caption),
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map(([first, ...cells]) =>
        el("tr", {}, el("th", { scope: "row" }, first), cells.map((cell, place) => el("td", { "data-name": head[place + 1] }, cell)))))));
}

/** Adds a table that is built only while it is open; returns the function that takes new data and their number. */
export function tabular(parent, title, build) {
  const place = el("div");
  const details = el("details", { class: "tabular" },
    el("summary", {}, "As a table", el("span", { class: "unseen" }, `: ${title}`)), place);
  parent.append(details);
  let shown = null;
  const fill = () => {
    if (details.open && shown !== null) replace(place, build(shown));
  };
  details.hidden = true;
  details.addEventListener("toggle", fill);
  return (data, rows) => {
    details.hidden = rows === 0;
    shown = data;
    fill();
  };
}

/** Replaces the old node by a new one unless both are equal, so that selected text stays selected. */
export function replace(place, node) {
  const old = place.firstElementChild;
  if (!old) place.replaceChildren(node);
  else if (!old.isEqualNode(node)) {
    const isFocused = old === document.activeElement;
    const left = old.scrollLeft;
    place.replaceChildren(node);
    node.scrollLeft = left;
    if (isFocused) node.focus({ preventScroll: true });
  }
}

/** Rows of `series.rows` for `table`. */
export const timed = (rows) => rows.map(({ at, cells }) => [stamp(at, "minute"), ...cells]);

/** A list of names and values from `pairs` of [name, value]; null pairs are left out. */
export function facts(pairs) {
  return el("dl", { class: "facts" },
    pairs.filter(Boolean).map(([name, value]) => {
      const isUnknown = value === "not known" || value.classList?.contains("unknown");
      return el("div", {}, el("dt", {}, name), el("dd", { class: isUnknown ? "muted" : null }, isUnknown ? "not known" : value));
    }));
}

/** A bar for a share of 1, hidden from screen readers: the text next to it says the same. */
export function bar(share, tone) {
  const fill = el("span", { class: `fill tone-${tone}` });
  fill.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, fill);
}

/** A word with a sign, so that the meaning never depends on the colour alone. */
export function mark(level, text) {
  const signs = { ok: "✓", warn: "!", bad: "✕", quiet: "·" };
  return el("span", { class: `mark-${level}` }, el("span", { class: "glyph", "aria-hidden": "true" }, signs[level]), text);
}
