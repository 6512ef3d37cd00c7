// Puts the page together: fetches and draws the data, and shows their age.

import { el, keyed, say } from "./dom.js";
import { clock, count, duration, ended, unbroken } from "./format.js";
import { events } from "./events.js";
import { figures } from "./figures.js";
import { memory } from "./memory.js";
import { nights } from "./nights.js";
import { Poller } from "./poll.js";
import { quality } from "./quality.js";
import { complete } from "./series.js";
import { serving } from "./serving.js";

const STALE_MS = 20000;
const LEVELS = ["ok", "warn", "bad"];
const REFUSALS = {
  unknown: "The service does not know this token.",
  scope: "The service knows this token, but it lacks the scope admin.",
};

const find = (id) => document.getElementById(id);
const panels = [figures(), ...serving(), ...events(), ...nights(), ...memory(), ...quality()];

let newest = null;
let trouble = null;
let isLocked = false;

/** Shows the verdict of the service while its data are new, and otherwise what the page itself knows. */
function judge(isStale, age) {
  const told = newest?.data.verdict ?? {};
  const level = isStale || !LEVELS.includes(told.level) ? "unknown" : told.level;
  find("verdict").dataset.level = level;
  if (!newest) {
    say(find("sentence"), isLocked ? "The service asks for its token."
      : trouble ? ended(`The service gives no numbers: ${trouble}`) : "Waiting for the data of the service.");
    advise(trouble && !isLocked ? "Check whether it runs. This page keeps trying." : null);
  } else if (isStale) {
    say(find("sentence"), "The current state of the service is not known.");
    const last = told.sentence ? ` The service then said: ${told.sentence}` : "";
    advise(`These numbers are from ${clock(newest.at / 1000, "second")}.${trouble ? ended(` No new ones: ${trouble}`) : ""}${last}`);
  } else {
    say(find("sentence"), told.sentence ? unbroken(String(told.sentence)) : "The service does not say yet whether all is well.");
    advise(told.advice, told.also ?? []);
  }
  const title = { ok: "All well", warn: `Look: ${told.sentence}`, bad: `Alarm: ${told.sentence}`, unknown: "Not known" }[level];
  document.title = `${title} · Larder`;
  if (!newest) say(find("age"), isLocked ? "Waiting for the token" : trouble ? "No contact" : "Waiting for the service");
  else if (poller.isPaused) say(find("age"), `Paused; ${duration(age)} old`);
  else say(find("age"), trouble ? `No contact; ${duration(age)} old` : `Updated ${duration(age)} ago`);
}

function advise(text, also = []) {
  say(find("advice"), text ?? "");
  find("advice").hidden = !text;
  keyed(find("also"), also, {
    key: (each) => each, make: () => el("li"), update: (node, each) => say(node, String(each)),
  });
  find("also").hidden = !also.length;
}

/** Updates verdict and age; runs every second, and after each answer. */
function tick() {
  const age = newest ? Math.max(0, Math.round((Date.now() - newest.at) / 1000)) : 0;
  const isStale = newest !== null && Date.now() - newest.at > STALE_MS;
  document.documentElement.classList.toggle("is-stale", isStale);
  judge(isStale, age);
}

/** A sentence that says from which replicas the numbers come. */
function whose({ whole, trouble: why, replicas }) {
  if (whole === false) return ended(`These are the numbers of one worker only: ${why ?? "Redis does not answer"}`);
  const all = Array.isArray(replicas) ? replicas.filter(Boolean) : [];
  if (all.length < 2) return all.length ? "Numbers of the only replica." : "";
  return `Numbers of ${count(all.length)} replicas together.`;
}

function draw(data) {
  const series = complete(data);
  for (const panel of panels) {
    try {
      panel(data, series);
    } catch (error) {
      console.error(error);
    }
  }
  say(find("whose"), whose(data));
  find("whose").hidden = !find("whose").textContent;
}

const poller = new Poller({
  url: new URL("data", import.meta.url),
  onData(data) {
    newest = { data, at: Date.now() };
    trouble = null;
    isLocked = false;
    find("ask").hidden = true;
    find("numbers").hidden = false;
    draw(data);
    tick();
  },
  onTrouble(why) {
    trouble = why;
    tick();
  },
  onToken(refusal) {
    trouble = "it asks for its token";
    isLocked = true;
    find("ask").hidden = false;
    find("numbers").hidden = newest === null;
    say(find("ask-why"), REFUSALS[refusal] ?? "");
    find("token").value = "";
    tick();
    find("token").focus();
  },
});

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  poller.use(find("token").value);
});

find("pause").addEventListener("click", () => {
  const isPaused = !poller.isPaused;
  poller.pause(isPaused);
  find("pause").setAttribute("aria-pressed", String(isPaused));
  tick();
});

say(find("zone"), `Times are in your time zone, ${Intl.DateTimeFormat().resolvedOptions().timeZone ?? "as set on this device"}; point at a time to see it in UTC.`);
setInterval(tick, 1000);
poller.look();
