"""Verdict in one sentence, for the top: whether all is well, and if not what to do. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cache.format.manifest import CUT_CHARS
from serving.answers.reasons import Stale
from serving.answers.sources import FALLBACKS, STORED
from serving.events.counts import ACCEPTED, ERASED, REPEATED
from serving.fresh.event_follower import BEHIND

Level = Literal["ok", "warn", "bad"]
Body = Mapping[str, Any]

ENOUGH = 200
"""Answers below which a share says nothing."""
DROP = 0.10
"""Points of the hit rate that the last five minutes may be below the hour before."""
SURGE = 0.05
"""Points that previous and default may have more of the answers than in the hour before."""
SURGE_BAD = 0.30
MEMORY_WARN, MEMORY_BAD = 0.90, 0.98
"""Shares of Redis' maxmemory in use from which the verdict is warn, and bad."""
STREAM_WARN = 0.8
"""Share of its bytes that the stream of events has from which the verdict is warn."""
INBOX_WARN_S = 60
"""Seconds that events may wait in the inbox: what a consumer that died has is taken by another one after 30."""
REJECTED_WARN = 0.05
"""Share of the events that may be rejected, those of who was erased apart."""
_ROOM = (
    "A night makes room: larder night. If it fills again: [events] stream_bytes, and its maxmemory."
)


class Finding(NamedTuple):
    """Something that is not as it should be."""

    level: Level
    sentence: str
    advice: str


def verdict(body: Body) -> dict[str, Any]:
    """Level, sentence, advice, and in `also` the sentences of what else was found, worst first."""
    found = sorted(
        (each for look in _LOOKS for each in look(body)), key=lambda each: each.level != "bad"
    )
    if not found:
        return {"level": "ok", "sentence": _well(body), "advice": None, "also": []}
    first = found[0]
    return {
        "level": first.level, "sentence": first.sentence, "advice": first.advice,
        "also": [each.sentence for each in found[1:]],
    }  # fmt: skip


def _well(body: Body) -> str:
    live, share = _live(body), _share(body["lately"]["answers"], STORED)
    parts = [f"generation {live} is live on {_count(len(body['replicas']), 'replica')}"]
    if share is not None:
        parts.append(f"{share:.1%} of the answers of the last minutes came from cache")
    return f"All is well: {' and '.join(parts)}."


def _live(body: Body) -> str | None:
    return next((each["generation"] for each in body["replicas"] if each["generation"]), None)


def _share(answers: Mapping[str, int], sources: Sequence[str]) -> float | None:
    total = sum(answers.values())
    return sum(answers.get(each, 0) for each in sources) / total if total >= ENOUGH else None


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _ready(body: Body) -> Iterator[Finding]:
    out = [each for each in body["replicas"] if not each["ready"]]
    if out:
        why = next((each["failed"] for each in out if each["failed"]), "see /readyz")
        served = all(each["generation"] is None for each in out)
        advice = (
            "Publish a generation: larder night."
            if served
            else f"Look at the log of {out[0]['replica']}; larder roll-back returns to the last good one."
        )
        of = f"{len(out)} of {_count(len(body['replicas']), 'replica')}"
        yield Finding("bad", f"{of} cannot be asked: {why.rstrip('.')}.", advice)


def _redis(body: Body) -> Iterator[Finding]:
    if not body["whole"]:
        yield Finding(
            "bad",
            f"Redis cannot be asked ({str(body['trouble']).rstrip('.')}): answers come from L1, the live model and "
            "defaults, and these figures are of one worker alone.",
            "Start Redis again or repair the network; if it came back empty, run larder restore.",
        )
    elif opened := body["breakers"].get("open", 0) + body["breakers"].get("half_open", 0):
        yield Finding(
            "bad",
            f"{_count(opened, 'worker')} left Redis alone after failures (breaker open).",
            "Look at Redis' latency (LATENCY LATEST, SLOWLOG GET) and at the network of those replicas.",
        )


def _lost_pointer(body: Body) -> Iterator[Finding]:
    # Without Redis nobody can tell, and that is said already.
    if body["whole"] and Stale.POINTER_VANISHED in _stale_words(body):
        yield Finding(
            "bad",
            "Redis came back without its pointer, so perhaps without any page.",
            "Run larder restore: it loads pages and pointer from the artefact store again.",
        )


def _stale(body: Body) -> Iterator[Finding]:
    reasons = sorted(_stale_words(body) - {BEHIND, Stale.POINTER_VANISHED})
    # Without Redis this is said already.
    if body["whole"] and reasons:
        yield Finding(
            "warn",
            f"Answers may lag behind what was published: {', '.join(reasons)}.",
            "larder status shows the pointer; larder restore rebuilds it from the records.",
        )


def _stale_words(body: Body) -> set[str]:
    told = [each["stale"] for each in body["replicas"] if each["stale"]]
    return {word for each in told for word in each.split(",")}


def _missing(body: Body) -> Iterator[Finding]:
    schedule = body["schedule"]
    if schedule["missing"] and _live(body) is not None:
        age = (
            ""
            if schedule["age_s"] is None
            else f": what is served is {_span(schedule['age_s'])} old"
        )
        yield Finding(
            "bad",
            f"The last night brought no generation{age}.",
            "Look at the last run of the DAG, or run larder night.",
        )


def _refused(body: Body) -> Iterator[Finding]:
    # One of the live one's cut is no older, wherever its digest sorts it.
    cut = (_live(body) or "")[:CUT_CHARS]
    refused = (each for each in body["generations"] if each["state"] == "refused")
    newest = next((each for each in refused if each["generation"][:CUT_CHARS] >= cut), None)
    if newest is not None:
        failed = [each["rule"] for each in newest["gates"] if each["verdict"] == "failed"]
        yield Finding(
            "warn",
            f"Generation {newest['generation']} was refused by {', '.join(failed) or 'a gate'}, what is live stays.",
            "Read the gate's reason below; if it is right all the same: larder override, then verify.",
        )


def _apart(body: Body) -> Iterator[Finding]:
    held = sorted({each["generation"] for each in body["replicas"] if each["generation"]})
    if len(held) > 1:
        yield Finding(
            "warn",
            f"Replicas answer from {len(held)} generations: {', '.join(held)}.",
            "A flip takes a second; if it lasts, restart the replicas that stayed behind.",
        )


def _fallback(body: Body) -> Iterator[Finding]:
    now = _share(body["lately"]["answers"], FALLBACKS)
    before = _share(body["earlier"]["answers"], FALLBACKS) or 0.0
    if now is not None and now - before >= SURGE:
        level: Level = "bad" if now - before >= SURGE_BAD else "warn"
        reason = max(body["lately"]["misses"].items(), key=lambda each: each[1], default=None)
        why = "" if reason is None else f", mostly because of {reason[0]}"
        yield Finding(
            level,
            f"{now:.1%} of the answers are from the previous generation or defaults ({before:.1%} before){why}.",
            "Look at the miss reasons and at the live path: queue, model, time-outs.",
        )


def _hits(body: Body) -> Iterator[Finding]:
    now, before = (
        _share(body["lately"]["answers"], STORED),
        _share(body["earlier"]["answers"], STORED),
    )
    if now is not None and before is not None and before - now >= DROP:
        yield Finding(
            "warn",
            f"The hit rate fell to {now:.1%} from {before:.1%}.",
            "Look at the miss reasons; after a restart or a flip it comes back by itself within minutes.",
        )


def _degraded(body: Body) -> Iterator[Finding]:
    why = sorted({each["degraded"] for each in body["replicas"] if each["degraded"]})
    if why:
        yield Finding(
            "warn",
            f"The live model does not work ({why[0]}): ids the night does not know get defaults.",
            "Roll back (larder roll-back), then look at the bundle.",
        )


def _memory(body: Body) -> Iterator[Finding]:
    told = body["redis"]
    if not told["limit_bytes"] or told["used_bytes"] is None:
        return
    share = told["used_bytes"] / told["limit_bytes"]
    if share >= MEMORY_WARN:
        yield Finding(
            "bad" if share >= MEMORY_BAD else "warn",
            f"Redis is {share:.0%} full: the next night may not fit.",
            "Raise maxmemory, or retire generations: larder retire.",
        )


def _policy(body: Body) -> Iterator[Finding]:
    policy = body["redis"]["policy"]
    if policy and policy.startswith("allkeys"):
        yield Finding(
            "bad",
            f"Redis may evict published pages: its maxmemory-policy is {policy}.",
            "Set maxmemory-policy volatile-lru.",
        )


def _shed(body: Body) -> Iterator[Finding]:
    entities, shed = sum(body["lately"]["answers"].values()), body["queue"]["shed_lately"]
    if shed and shed >= 0.01 * max(entities, 1):
        yield Finding(
            "warn",
            f"Overload: {shed} inferences or requests were left out in the last minutes.",
            "Add workers or replicas (LARDER_WORKERS); the load is more than these can answer in time.",
        )


def _events(body: Body) -> Iterator[Finding]:
    told = body["events"]
    if told is None:
        return
    if told["up"] is False:
        found, demanded = told["durability"], told["demanded"]
        # What was found is that of the last look: one that kept enough then, or was never looked at, is away.
        falls_short = demanded != "any" and found not in (None, "always", demanded)
        why = f"keeps less than is demanded (found: {found}, demanded: {demanded})"
        yield Finding(
            "bad",
            f"No events are accepted: their Redis {why if falls_short else 'is away'}.",
            "larder check says more. Producers send again whatever has no 202.",
        )
    if refused := told["refused"].get("events_full"):
        yield Finding(
            "bad",
            f"The stream of events is full: events were refused {_count(refused, 'time')} in the last minutes.",
            _ROOM,
        )
    elif (full := _part(told["stream_bytes"], told["stream_max_bytes"])) >= STREAM_WARN:
        yield Finding("warn", f"The stream of events is {full:.0%} full.", _ROOM)
    if BEHIND in _stale_words(body):
        held = _part(told["held_bytes"], told["held_max_bytes"])
        yield Finding(
            "warn",
            f"Answers may lack accepted events: a worker is {told['lag_s'] or 0:.1f} s behind, "
            f"its memory for events {held:.0%} full.",
            "At 100 % a night has to take events over (larder night); else look at that replica's log.",
        )
    if (waits_s := told["inbox_lag_seconds"] or 0) >= INBOX_WARN_S:
        yield Finding(
            "warn",
            f"Events have waited in the inbox for {waits_s:.0f} s.",
            "Look for consumers that are gone (XINFO CONSUMERS) and at the service's log.",
        )
    rejected = {
        name: n for name, n in told["results"].items() if name not in (ACCEPTED, REPEATED, ERASED)
    }
    of = sum(told["results"].values())
    if of >= ENOUGH and (share := sum(rejected.values()) / of) >= REJECTED_WARN:
        most = max(rejected, key=lambda each: rejected[each])
        yield Finding(
            "warn",
            f"{share:.1%} of the events were rejected, mostly as {most}.",
            "The newest lie with their reasons in the stream of rejected events: mend what sends them.",
        )


def _part(of: float | None, whole: float | None) -> float:
    return of / whole if of is not None and whole else 0.0


def _span(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.1f} days"


_LOOKS: tuple[Callable[[Body], Iterator[Finding]], ...] = (
    _ready, _redis, _lost_pointer, _missing, _policy, _fallback, _memory, _stale, _apart, _hits, _refused, _degraded,
    _shed, _events,
)  # fmt: skip
