// Users that each night copied from an earlier one, users that it computed and why, and the time saved.

import { described } from "./chart.js";
import { el, keyed } from "./dom.js";
import { count, duration, isNumber, percent, stamp } from "./format.js";
import { panel, replace, table, tabular } from "./panel.js";

const REASONS = [
  ["copied", "copied", "n1"],
  ["inputs", "computed: other inputs", "n2"],
  ["lost", "computed: an item of the list gone or changed", "n3"],
  ["entered", "computed: an item that may enter the list", "n4"],
  ["computed", "computed: nothing to copy from", "rest"],
];

const list = (value) => (Array.isArray(value) ? value.filter((each) => each && typeof each === "object") : []);
const users = (reuse, name) => (isNumber(reuse.users?.[name]) ? reuse.users[name] : 0);
const share = (reuse, name) => users(reuse, name) / REASONS.reduce((sum, [each]) => sum + users(reuse, each), 0);

/** Returns the panel of copies as a function that draws it. */
export function copies() {
  const part = panel("nights", "Copied by the last nights", 12);
  const rows = el("ul", { class: "nights copies" });
  const legend = el("ul", { class: "legend" });
  part.body.append(rows, legend);
  const tell = tabular(part.body, part.title, (nights) =>
    table("Users of the last nights, by whether they were copied", ["Night", ...REASONS.map(([, label]) => label), "Share copied", "Spared"],
      nights.map(({ began_at: began, reuse }) => [
        stamp(began), ...REASONS.map(([name]) => count(users(reuse, name))), percent(share(reuse, "copied")), duration(reuse.spared_s),
      ])));
  return (data) => {
    const nights = list(data.nights).filter(({ reuse }) => reuse && typeof reuse === "object").slice(0, 10);
    part.lede(nights.length ? said(nights[0].reuse) : "No night has reported its copies yet.");
    keyed(rows, nights, {
      key: (night, index) => `${night.generation} ${night.began_at ?? index}`,
      make: () => el("li"),
      update: (node, night) => replace(node, lane(night)),
    });
    const seen = REASONS.filter(([name]) => nights.some(({ reuse }) => users(reuse, name) > 0));
    replace(legend, el("li", { class: "inner" }, seen.map(([, label, tone]) =>
      el("span", { class: "entry" }, el("span", { class: `swatch tone-${tone}` }), el("span", { class: "name" }, label)))));
    legend.hidden = !seen.length;
    tell(nights, nights.length);
  };
}

function said(reuse) {
  const { nights, share: copied, spared_s: spared } = reuse.lately ?? {};
  const newest = reuse.why ? `The newest: ${reuse.why}. ` : "";
  if (!isNumber(nights) || !isNumber(copied)) return `${newest}How much was copied is not known.`;
  const whose = nights === 1 ? "the last night" : `the last ${nights} nights`;
  const each = isNumber(spared) ? `; ${duration(spared)} of scoring spared${nights === 1 ? "" : " a night"}` : "";
  return `${newest}Of the users of ${whose} ${percent(copied)} were copied${each}.`;
}

function lane({ began_at: began, reuse }) {
  const lane = el("span", { class: "lane", role: "img",
    "aria-label": described("Users", REASONS.map(([name, label]) => ({ label, told: count(users(reuse, name)) }))) });
  for (const [name, label, tone] of REASONS) {
    const part = share(reuse, name);
    if (!(part > 0)) continue;
    const piece = el("span", { class: `piece tone-${tone}`, title: `${label}: ${percent(part)}` });
    piece.style.width = `${part * 100}%`;
    lane.append(piece);
  }
  return el("span", { class: "night" },
    el("span", { class: "when" }, stamp(began)),
    el("span", { class: "outcome" }, isNumber(reuse.spared_s) ? `${duration(reuse.spared_s)} spared` : ""),
    lane, el("span", { class: "value" }, percent(share(reuse, "copied"))));
}
