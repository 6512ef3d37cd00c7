"""Verdict in one sentence, for the top: whether all is well, and if not what to do. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cache.format.manifest import CUT_CHARS
from serving.answers.reasons import StaleReason
from serving.answers.sources import FALLBACKS, STORED_SOURCES
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
    findings = sorted(
        (finding for check in _CHECKS for finding in check(body)),
        key=lambda finding: finding.level != "bad",
    )
    if not findings:
        return {"level": "ok", "sentence": _well(body), "advice": None, "also": []}
    first = findings[0]
    return {
        "level": first.level, "sentence": first.sentence, "advice": first.advice,
        "also": [finding.sentence for finding in findings[1:]],
    }  # fmt: skip


def _well(body: Body) -> str:
    live, cache_share = _live(body), _share_of_sources(body["lately"]["answers"], STORED_SOURCES)
    parts = [f"generation {live} is live on {_count(len(body['replicas']), 'replica')}"]
    if cache_share is not None:
        parts.append(f"{cache_share:.1%} of the answers of the last minutes came from cache")
    return f"All is well: {' and '.join(parts)}."


def _live(body: Body) -> str | None:
    return next(
        (replica["generation"] for replica in body["replicas"] if replica["generation"]), None
    )


def _share_of_sources(answers: Mapping[str, int], sources: Sequence[str]) -> float | None:
    total = sum(answers.values())
    return sum(answers.get(source, 0) for source in sources) / total if total >= ENOUGH else None


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _ready(body: Body) -> Iterator[Finding]:
    unready_replicas = [replica for replica in body["replicas"] if not replica["ready"]]
    if unready_replicas:
        failure = next(
            (replica["failed"] for replica in unready_replicas if replica["failed"]), "see /readyz"
        )
        served = all(replica["generation"] is None for replica in unready_replicas)
        advice = (
            "Publish a generation: larder night."
            if served
            else f"Look at the log of {unready_replicas[0]['replica']}; larder roll-back returns to the last good one."
        )
        of = f"{len(unready_replicas)} of {_count(len(body['replicas']), 'replica')}"
        yield Finding("bad", f"{of} cannot be asked: {failure.rstrip('.')}.", advice)


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
    if body["whole"] and StaleReason.POINTER_VANISHED in _stale_words(body):
        yield Finding(
            "bad",
            "Redis came back without its pointer, so perhaps without any page.",
            "Run larder restore: it loads pages and pointer from the artefact store again.",
        )


def _stale(body: Body) -> Iterator[Finding]:
    reasons = sorted(_stale_words(body) - {BEHIND, StaleReason.POINTER_VANISHED})
    # Without Redis this is said already.
    if body["whole"] and reasons:
        yield Finding(
            "warn",
            f"Answers may lag behind what was published: {', '.join(reasons)}.",
            "larder status shows the pointer; larder restore rebuilds it from the records.",
        )


def _stale_words(body: Body) -> set[str]:
    stale_texts = [replica["stale"] for replica in body["replicas"] if replica["stale"]]
    return {stale_reason for stale_text in stale_texts for stale_reason in stale_text.split(",")}


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
    refused = (generation for generation in body["generations"] if generation["state"] == "refused")
    newest_refused = next(
        (generation for generation in refused if generation["generation"][:CUT_CHARS] >= cut), None
    )
    if newest_refused is not None:
        failed = [gate["rule"] for gate in newest_refused["gates"] if gate["verdict"] == "failed"]
        yield Finding(
            "warn",
            f"Generation {newest_refused['generation']} was refused by {', '.join(failed) or 'a gate'}, what is live "
            "stays.",
            "Read the gate's reason below; if it is right all the same: larder override, then verify.",
        )


def _apart(body: Body) -> Iterator[Finding]:
    served_generations = sorted(
        {replica["generation"] for replica in body["replicas"] if replica["generation"]}
    )
    if len(served_generations) > 1:
        yield Finding(
            "warn",
            f"Replicas answer from {len(served_generations)} generations: {', '.join(served_generations)}.",
            "A flip takes a second; if it lasts, restart the replicas that stayed behind.",
        )


def _fallback(body: Body) -> Iterator[Finding]:
    recent_share = _share_of_sources(body["lately"]["answers"], FALLBACKS)
    earlier_share = _share_of_sources(body["earlier"]["answers"], FALLBACKS) or 0.0
    if recent_share is not None and recent_share - earlier_share >= SURGE:
        level: Level = "bad" if recent_share - earlier_share >= SURGE_BAD else "warn"
        reason = max(
            body["lately"]["misses"].items(),
            key=lambda reason_and_count: reason_and_count[1],
            default=None,
        )
        cause_text = "" if reason is None else f", mostly because of {reason[0]}"
        yield Finding(
            level,
            f"{recent_share:.1%} of the answers are from the previous generation or defaults ({earlier_share:.1%} "
            f"before){cause_text}.",
            "Look at the miss reasons and at the live path: queue, model, time-outs.",
        )


def _hits(body: Body) -> Iterator[Finding]:
    recent_share, earlier_share = (
        _share_of_sources(body["lately"]["answers"], STORED_SOURCES),
        _share_of_sources(body["earlier"]["answers"], STORED_SOURCES),
    )
    if (
        recent_share is not None
        and earlier_share is not None
        and earlier_share - recent_share >= DROP
    ):
        yield Finding(
            "warn",
            f"The hit rate fell to {recent_share:.1%} from {earlier_share:.1%}.",
            "Look at the miss reasons; after a restart or a flip it comes back by itself within minutes.",
        )


def _degraded(body: Body) -> Iterator[Finding]:
    degraded_reasons = sorted(
        {replica["degraded"] for replica in body["replicas"] if replica["degraded"]}
    )
    if degraded_reasons:
        yield Finding(
            "warn",
            f"The live model does not work ({degraded_reasons[0]}): ids the night does not know get defaults.",
            "Roll back (larder roll-back), then look at the bundle.",
        )


def _memory(body: Body) -> Iterator[Finding]:
    redis_state = body["redis"]
    if not redis_state["limit_bytes"] or redis_state["used_bytes"] is None:
        return
    used_share = redis_state["used_bytes"] / redis_state["limit_bytes"]
    if used_share >= MEMORY_WARN:
        yield Finding(
            "bad" if used_share >= MEMORY_BAD else "warn",
            f"Redis is {used_share:.0%} full: the next night may not fit.",
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
    events = body["events"]
    if events is None:
        return
    if events["up"] is False:
        found_durability, demanded = events["durability"], events["demanded"]
        # What was found is that of the last look: one that kept enough then, or was never looked at, is away.
        falls_short = demanded != "any" and found_durability not in (None, "always", demanded)
        shortfall = f"keeps less than is demanded (found: {found_durability}, demanded: {demanded})"
        yield Finding(
            "bad",
            f"No events are accepted: their Redis {shortfall if falls_short else 'is away'}.",
            "larder check says more. Producers send again whatever has no 202.",
        )
    if refused := events["refused"].get("events_full"):
        yield Finding(
            "bad",
            f"The stream of events is full: events were refused {_count(refused, 'time')} in the last minutes.",
            _ROOM,
        )
    elif (full := _part(events["stream_bytes"], events["stream_max_bytes"])) >= STREAM_WARN:
        yield Finding("warn", f"The stream of events is {full:.0%} full.", _ROOM)
    if BEHIND in _stale_words(body):
        memory_share = _part(events["held_bytes"], events["held_max_bytes"])
        yield Finding(
            "warn",
            f"Answers may lack accepted events: a worker is {events['lag_s'] or 0:.1f} s behind, "
            f"its memory for events {memory_share:.0%} full.",
            "At 100 % a night has to take events over (larder night); else look at that replica's log.",
        )
    if (waits_s := events["inbox_lag_seconds"] or 0) >= INBOX_WARN_S:
        yield Finding(
            "warn",
            f"Events have waited in the inbox for {waits_s:.0f} s.",
            "Look for consumers that are gone (XINFO CONSUMERS) and at the service's log.",
        )
    rejected = {
        name: n for name, n in events["results"].items() if name not in (ACCEPTED, REPEATED, ERASED)
    }
    of = sum(events["results"].values())
    if of >= ENOUGH and (rejected_share := sum(rejected.values()) / of) >= REJECTED_WARN:
        top_reason = max(rejected, key=lambda reason: rejected[reason])
        yield Finding(
            "warn",
            f"{rejected_share:.1%} of the events were rejected, mostly as {top_reason}.",
            "The newest lie with their reasons in the stream of rejected events: mend what sends them.",
        )


def _part(of: float | None, total: float | None) -> float:
    return of / total if of is not None and total else 0.0


def _span(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.1f} days"


_CHECKS: tuple[Callable[[Body], Iterator[Finding]], ...] = (
    _ready, _redis, _lost_pointer, _missing, _policy, _fallback, _memory, _stale, _apart, _hits, _refused, _degraded,
    _shed, _events,
)  # fmt: skip
