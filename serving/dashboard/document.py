"""The document of `GET /dashboard/data`: its schema, its fields, and the verdict in one sentence. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from cache.format.manifest import CUT_CHARS
from cache.format.stream_position import Position
from cache.store.artefacts import NO_MANIFEST_WORDS
from cache.traffic.experiments import rate_ratio
from serving.dashboard import counters
from serving.dashboard.aggregator import LATELY_BINS, DrawnBin, FleetReading, quantiles, series
from serving.dashboard.counters import BIN_S, merge_rows, merged_counts
from serving.events.counts import (
    ACCEPTED,
    CHANGED_PPM,
    COMPARED,
    ERASED,
    NEWER_EVENT_ANSWERS,
    REFUSED,
    REPEATED,
    TAKEN_IN,
)
from serving.events.follower import EVENTS_BEHIND
from serving.generations.nights import used_and_max_bytes
from serving.requests.answers import FALLBACK_SOURCES, STORED_SOURCES, Source
from serving.requests.named_schema import DETAILS_SCHEMA, Json, NamedSchema, nullable_schema
from serving.requests.reasons import StaleReason
from serving.traffic.router import FEEDBACK_OF_ARM, REQUESTS_OF_ARM

Level = Literal["ok", "warn", "bad"]

Body = Mapping[str, Any]

Worker = Mapping[str, Any]

SETTLED_S = 3.0
"""Seconds from the end of a bin until it is shown: by then every worker has published its part."""

ANSWERS_MIN = 200
"""Answers below which a share says nothing."""

HIT_RATE_DROP = 0.10
"""Points of the hit rate that the last five minutes may be below the hour before."""

FALLBACK_SURGE = 0.05
"""Points that previous and default may have more of the answers than in the hour before."""

FALLBACK_SURGE_BAD = 0.30

MEMORY_WARN, MEMORY_BAD = 0.90, 0.98
"""Shares of Redis' maxmemory in use from which the verdict is warn, and bad."""

STREAM_WARN = 0.8
"""Share of its bytes that the stream of events has from which the verdict is warn."""

INBOX_WARN_S = 60
"""Seconds that events may wait in the inbox: entries of a dead consumer are claimed by another one after 30."""

REJECTED_WARN = 0.05
"""Share of the events that may be rejected, those of who was erased apart."""

_STREAM_ADVICE = (
    "A night makes room: larder night. If it fills again: [events] stream_bytes, and its maxmemory."
)

_NUMBERS: Json = {"type": "array", "items": {"type": ["number", "null"]}}

_BY_NAME = NamedSchema(
    "SeriesByName",
    {
        "type": "object",
        "description": "A value for each step, null where none is known, by name",
        "additionalProperties": _NUMBERS,
    },
)

_COUNTS = NamedSchema(
    "Counts",
    {
        "type": "object",
        "description": "Counts by name",
        "additionalProperties": {"type": "integer"},
    },
)


def _object(name: str, description: str, /, **properties: Json) -> NamedSchema:
    return NamedSchema(
        f"Dashboard{name}",
        {"type": "object", "description": description, "properties": properties},
    )


def _by_name(name: str, description: str, of: Json) -> NamedSchema:
    return NamedSchema(
        f"Dashboard{name}",
        {"type": "object", "description": description, "additionalProperties": of},
    )


def _maybe(kind: str, description: str = "") -> Json:
    return {"type": [kind, "null"]} | ({"description": description} if description else {})


def _list(of: Json) -> Json:
    return {"type": "array", "items": of}


_ANSWERS = _by_name("AnswerCounts", "Counts of answers by source", {"type": "integer"})

_REUSE_SCHEMA = _object(
    "Reuse",
    "Users by reason (copied; computed for their inputs, for an item lost, for one that may enter), "
    "the share copied and the seconds of scoring spared; null: it does not say",
    users=_COUNTS, share=_maybe("number"), spared_s={"type": "number"}, base=_maybe("string"),
    why={"type": "string"}, read_because={"type": "string"},
    lately=_object(
        "RecentReuse",
        "The last nights up to it, 14 at most: users added up, the mean of the seconds",
        nights={"type": "integer"}, users=_COUNTS, share=_maybe("number"),
        spared_s={"type": "number"},
    ),
)  # fmt: skip

_EVENTS_SCHEMA = _object(
    "Events",
    "Of the last minutes, and of all workers as bad as the last of them; null where none are taken in",
    up=_maybe("boolean", "Whether their Redis answers, and keeps them as demanded"),
    durability=_maybe("string"), demanded=_maybe("string"), results=_COUNTS, refused=_COUNTS,
    answers={"type": "integer", "description": "Those with newer events"},
    answers_share=_maybe("number"),
    list_change=_maybe("number", "Share of their lists that is not in the night's"),
    lag_s=_maybe("number"), users=_maybe("number"), held_bytes=_maybe("number"),
    held_max_bytes=_maybe("number"), stream_bytes=_maybe("number"), stream_max_bytes=_maybe("number"),
    stream_length=_maybe("number"), inbox_length=_maybe("number"), inbox_lag_seconds=_maybe("number"),
    counted_until=_maybe("string", "Position up to which answers count all"),
    taken_until=_maybe("string", "Position up to which a generation has all"),
    published_until=_maybe("string", "Position up to which the live one has all"),
)  # fmt: skip

DASHBOARD: Json = _object(
    "Document",
    "What all replicas count, at most a second old; times are Unix seconds by Redis' clock; null is unknown",
    now={"type": "number"},
    whole={"type": "boolean", "description": "false: the numbers of one worker alone"},
    trouble=_maybe("string", "Why it is not whole"),
    verdict=_object(
        "Verdict", "Whether all is well",
        level={"type": "string", "enum": ["ok", "warn", "bad"]},
        sentence={"type": "string"},
        advice=_maybe("string", "What to do"),
        also=_list({"type": "string"}),
    ),
    replicas=_list(
        _object(
            "Replica", "The workers of one parent",
            replica={"type": "string"}, workers={"type": "integer"}, generation=_maybe("string"),
            epoch=_maybe("integer"), ready={"type": "boolean"}, stale=_maybe("string"),
            degraded=_maybe("string"), seen_s={"type": "number"}, failed=_maybe("string"),
        )
    ),
    series=_object(
        "Series", "The last hour in steps of `step_s`, oldest first; quantiles are off by 5 % at most",
        step_s={"type": "integer"}, at=_NUMBERS, requests=_NUMBERS, answers=_BY_NAME,
        seconds=_by_name("LatencySeries", "Quantiles in seconds by source", _BY_NAME),
        stages=_BY_NAME, misses=_BY_NAME, events=_BY_NAME,
    ),
    lately=_object(
        "Lately", "The last `seconds` as one",
        seconds={"type": "integer"}, requests={"type": "integer"}, answers=_ANSWERS, misses=_COUNTS,
        latency=_by_name("Latency", "Quantiles in seconds by source", DETAILS_SCHEMA),
    ),
    earlier=_object("Earlier", "The hour before that", answers=_ANSWERS),
    totals=_object(
        "Totals", "Since the start of each worker that runs: the sums of what /metrics tells on every replica",
        requests={"type": "integer"}, answers=_ANSWERS, misses=_COUNTS, entities={"type": "integer"},
    ),
    generations_at=_maybe("number", "When generations and nights were read"),
    generations=_list(
        _object(
            "Generation", "Newest first",
            generation={"type": "string"}, state=_maybe("string"), epoch=_maybe("integer"),
            role=_maybe("string", "Of those that this replica holds"), published_at=_maybe("number"),
            data_until=_maybe("number"), bytes=_maybe("integer"), records=_maybe("integer"),
            gates=_list(DETAILS_SCHEMA), reason=_maybe("string"),
            remarks=_list({"type": "string"}),
            events_until=_maybe("string", "Position up to which it has all events"),
        )
    ),
    schedule=_object(
        "Schedule", "When a generation should exist",
        age_s=_maybe("number"), due_at={"type": "number"}, missing={"type": "boolean"},
    ),
    nights=_list(
        _object(
            "Night", "Newest first; one that failed stands first until its step succeeds or a night is done, "
            "without a generation if it failed before it had one",
            generation={"type": "string"}, outcome={"type": "string"}, began_at=_maybe("number"),
            steps=_list(DETAILS_SCHEMA),
            reuse=nullable_schema(_REUSE_SCHEMA),
            failure=nullable_schema(
                _object(
                    "NightFailure", "Step that failed, when, and why",
                    step={"type": "string"}, at={"type": "number"}, error={"type": "string"},
                )
            ),
        )
    ),
    redis=_object(
        "Redis", "All nodes together",
        used_bytes=_maybe("integer"), limit_bytes=_maybe("integer"), policy=_maybe("string"),
        clients=_maybe("integer"), evicted=_maybe("integer"),
    ),
    breakers=_COUNTS,
    queue=_object("Queue", "All workers together; `queue_seconds` of the slowest"),
    l1=_object(
        "L1", "All workers together",
        bytes={"type": "integer"}, budget_bytes={"type": "integer"}, entries={"type": "integer"},
    ),
    advisor={**nullable_schema(DETAILS_SCHEMA), "description": "Of all workers together, each counted by its reads"},
    quality=nullable_schema(DETAILS_SCHEMA),
    events=nullable_schema(_EVENTS_SCHEMA),
    experiments=_list(
        _object(
            "Experiment", "Experiments that are not over",
            experiment={"type": "string"}, share={"type": "number"}, started_at=_maybe("number"),
            arms=_list(
                _object(
                    "Arm", "The control first; counts are those since the start of each worker that runs",
                    arm={"type": "string"}, namespace={"type": "string"}, share={"type": "number"},
                    generation=_maybe("string", "Live there, as far as this replica knows"),
                    requests={"type": "integer"},
                    events=_by_name(
                        "ArmEvents",
                        "By name: count, rate per request, and its ratio to the control's with bounds",
                        DETAILS_SCHEMA,
                    ),
                )
            ),
        )
    ),
)  # fmt: skip


def document(
    reading: FleetReading,
    *,
    schedule: Mapping[str, Any],
    archive: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    roles: Mapping[str, str],
    bounds: Sequence[float],
    advisor: Mapping[str, Any] | None,
    quality: Mapping[str, Any] | None,
    arms: Sequence[Mapping[str, Any]] = (),
    generations_at: float | None = None,
) -> dict[str, Any]:
    """Every field of the contract; `roles` are those of the generations that this replica holds, by role.

    `arms` are the experiments that it holds, each with its arms, the control first.
    """
    workers = [reading.workers[name] for name in sorted(reading.workers)]
    end_bin_start = int((reading.read_at - SETTLED_S) // BIN_S) * BIN_S
    recent = merged_counts(reading.lately.values())
    total = merged_counts(worker["counts"] or {} for worker in workers)
    of = {generation: role for role, generation in roles.items()}
    generation_rows, nights = archive
    generations = [
        {**generation_row, "role": of.get(generation_row["generation"])}
        for generation_row in generation_rows
    ]
    body: dict[str, Any] = {
        "now": reading.read_at,
        "whole": reading.trouble is None,
        "trouble": reading.trouble,
        "replicas": replicas(workers, reading.read_at),
        "series": series(reading.rows, end_bin_start),
        "lately": {
            "seconds": LATELY_BINS * BIN_S,
            "requests": recent.get(counters.REQUESTS, 0),
            "answers": _answers(recent),
            "misses": counters.counts_of_kind(recent, counters.MISSES),
            "latency": quantiles(recent, bounds),
        },
        "earlier": {"answers": _earlier(reading.rows, reading.lately)},
        "totals": {
            "requests": total.get(counters.REQUESTS, 0),
            "answers": _answers(total),
            "misses": counters.counts_of_kind(total, counters.MISSES),
            "entities": total.get(counters.ENTITIES, 0),
        },
        "generations_at": generations_at,
        "generations": generations,
        "schedule": dict(schedule),
        "nights": list(nights),
        "redis": redis(reading.infos),
        "breakers": {"closed": 0, "half_open": 0, "open": 0}
        | Counter(str(worker["breaker"]) for worker in workers),
        "queue": {
            "live_queued": _sum(workers, "live_queued"),
            "under_way": _sum(workers, "under_way"),
            "requests_max": _sum(workers, "requests_max"),
            "queue_seconds": max(
                (worker["queue_seconds"] or 0.0 for worker in workers), default=0.0
            ),
            "shed": total.get(counters.SHED, 0),
            "shed_lately": recent.get(counters.SHED, 0),
        },
        "l1": {
            "bytes": _sum(workers, "l1_bytes"),
            "budget_bytes": _sum(workers, "l1_budget_bytes"),
            "entries": _sum(workers, "l1_entries"),
        },
        "advisor": advisor,
        "quality": quality,
        "experiments": experiments(arms, total),
        "events": events(workers, recent, generations),
    }
    return {**body, "verdict": verdict(body)}


def _answers(counts: Mapping[str, int]) -> dict[str, int]:
    return {source.value: counts.get(counters.ANSWERS + source, 0) for source in Source}


def _earlier(rows: Mapping[int, DrawnBin], lately: Mapping[int, Any]) -> dict[str, int]:
    """Answers by source in the bins before those of `lately`."""
    answer_counts = Counter[str]()
    for start, row in rows.items():
        if start not in lately:
            answer_counts.update(row.answers)
    return {source.value: answer_counts[source] for source in Source}


def _sum(workers: Iterable[Worker], name: str) -> int:
    return sum(worker[name] or 0 for worker in workers)


def replicas(workers: Iterable[Worker], now_s: float) -> list[dict[str, Any]]:
    """Replicas by name, each the workers of one parent; it is as good, and as far, as the last of them."""
    groups: dict[str, list[Worker]] = {}
    for worker in workers:
        groups.setdefault(str(worker["replica"]), []).append(worker)
    replica_rows = []
    for name, group in sorted(groups.items()):
        last = min(group, key=lambda worker: worker["epoch"] or 0)
        replica_rows.append(
            {
                "replica": name,
                "workers": len(group),
                "generation": last["generation"],
                "epoch": last["epoch"],
                "ready": all(worker["ready"] for worker in group),
                "stale": _first(group, "stale"),
                "degraded": _first(group, "degraded"),
                "seen_s": round(max(max(0.0, now_s - worker["at"]) for worker in group), 3),
                "failed": _first(group, "failed"),
            }
        )
    return replica_rows


def _first(group: Iterable[Worker], name: str) -> str | None:
    return next((worker[name] for worker in group if worker[name]), None)


def events(
    workers: Iterable[Worker], recent: Mapping[str, int], generations: Iterable[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Summarise events from all workers' rows, with counts of `recent`; None if none are taken in.

    A night has taken over the events that some generation has, published or not.
    """
    events_overview = merge_rows([worker.get("events") for worker in workers])
    if events_overview is None:
        return None
    answer_count = sum(counters.counts_of_kind(recent, counters.ANSWERS).values())
    newer_answer_count, lists = (
        recent.get(NEWER_EVENT_ANSWERS, 0),
        recent.get(COMPARED, 0),
    )
    taken_positions = [
        events_until
        for generation_row in generations
        if (events_until := generation_row.get("events_until")) is not None
    ]
    return {
        **events_overview,
        "results": counters.counts_of_kind(recent, TAKEN_IN),
        "refused": counters.counts_of_kind(recent, REFUSED),
        "answers": newer_answer_count,
        "answers_share": newer_answer_count / answer_count if answer_count else None,
        "list_change": recent.get(CHANGED_PPM, 0) / (1e6 * lists) if lists else None,
        "taken_until": max(taken_positions, key=Position.parse, default=None),
    }


def redis(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Memory and evictions; of a cluster the sum of its nodes, and the policy that is worst."""
    if not infos:
        return dict.fromkeys(("used_bytes", "limit_bytes", "policy", "clients", "evicted"))
    policies = [str(info.get("maxmemory_policy", "")) for info in infos]
    used, limit = used_and_max_bytes(infos)
    return {
        "used_bytes": used,
        "limit_bytes": limit or None,
        "policy": next((policy for policy in policies if policy.startswith("allkeys")), policies[0])
        or None,
        "clients": sum(int(info.get("connected_clients", 0)) for info in infos),
        "evicted": sum(int(info.get("evicted_keys", 0)) for info in infos),
    }


def experiments(
    experiment_rows: Sequence[Mapping[str, Any]], total: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return experiments with the counts of all running workers; `experiment_rows` names arms, the control first.

    Counts from before a worker's start are in `larder experiment status`.
    """
    requests = counters.counts_of_kind(total, REQUESTS_OF_ARM)
    events = _events_by_arm(counters.counts_of_kind(total, FEEDBACK_OF_ARM))
    return [
        {
            **experiment_row,
            "arms": [
                _arm(experiment_row["experiment"], experiment_row["arms"], arm, requests, events)
                for arm in experiment_row["arms"]
            ],
        }
        for experiment_row in experiment_rows
    ]  # fmt: skip


def _events_by_arm(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Counts of events by arm and event."""
    counts_by_arm: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        arm, _, event = name.rpartition("=")
        counts_by_arm.setdefault(arm, {})[event] = count
    return counts_by_arm


def _arm(
    experiment: str,
    arms: Sequence[Mapping[str, Any]],
    arm: Mapping[str, Any],
    requests: Mapping[str, int],
    events: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    control, arm_key = (f"{experiment}={compared_arm['arm']}" for compared_arm in (arms[0], arm))
    base, arm_counts = events.get(control, {}), events.get(arm_key, {})
    figures_by_event = {}
    for event in sorted({*base, *arm_counts}):
        count_and_requests = (arm_counts.get(event, 0), requests.get(arm_key, 0))
        ratio = None
        if arm_key != control:
            ratio = rate_ratio(*count_and_requests, base.get(event, 0), requests.get(control, 0))
        figures_by_event[event] = {
            "count": count_and_requests[0],
            "rate": count_and_requests[0] / count_and_requests[1]
            if count_and_requests[1]
            else None,
            "ratio": None if ratio is None else ratio._asdict(),
        }
    return {**arm, "requests": requests.get(arm_key, 0), "events": figures_by_event}


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
        return {"level": "ok", "sentence": _well_sentence(body), "advice": None, "also": []}
    first = findings[0]
    return {
        "level": first.level, "sentence": first.sentence, "advice": first.advice,
        "also": [finding.sentence for finding in findings[1:]],
    }  # fmt: skip


def _well_sentence(body: Body) -> str:
    live, cache_share = (
        _live_generation(body),
        _share_of_sources(body["lately"]["answers"], STORED_SOURCES),
    )
    parts = [f"generation {live} is live on {_count(len(body['replicas']), 'replica')}"]
    if cache_share is not None:
        parts.append(f"{cache_share:.1%} of the answers of the last minutes came from cache")
    return f"All is well: {' and '.join(parts)}."


def _live_generation(body: Body) -> str | None:
    return next(
        (replica["generation"] for replica in body["replicas"] if replica["generation"]), None
    )


def _share_of_sources(answers: Mapping[str, int], sources: Sequence[str]) -> float | None:
    total = sum(answers.values())
    return (
        sum(answers.get(source, 0) for source in sources) / total if total >= ANSWERS_MIN else None
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _check_ready(body: Body) -> Iterator[Finding]:
    unready_replicas = [replica for replica in body["replicas"] if not replica["ready"]]
    if unready_replicas:
        failure = next(
            (replica["failed"] for replica in unready_replicas if replica["failed"]), "see /readyz"
        )
        strange = next(
            (r["replica"] for r in unready_replicas if NO_MANIFEST_WORDS in (r["failed"] or "")),
            None,
        )
        if strange is not None:
            advice = (
                f"{strange} has another artefact store: correct LARDER_ARTIFACTS there; if it is the right one, its "
                "files are gone: larder night."
            )
        elif all(replica["generation"] is None for replica in unready_replicas):
            advice = "Publish a generation: larder night."
        else:
            name = unready_replicas[0]["replica"]
            advice = f"Look at the log of {name}; larder roll-back returns to the last good one."
        of = f"{len(unready_replicas)} of {_count(len(body['replicas']), 'replica')}"
        yield Finding("bad", f"{of} cannot be asked: {failure.rstrip('.')}.", advice)


def _check_redis(body: Body) -> Iterator[Finding]:
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


def _check_pointer(body: Body) -> Iterator[Finding]:
    # Without Redis nobody can tell, and that is said already.
    if body["whole"] and StaleReason.POINTER_VANISHED in _stale_words(body):
        yield Finding(
            "bad",
            "Redis came back without its pointer, so perhaps without any page.",
            "Run larder restore: it loads pages and pointer from the artefact store again.",
        )


def _check_stale(body: Body) -> Iterator[Finding]:
    reasons = sorted(_stale_words(body) - {EVENTS_BEHIND, StaleReason.POINTER_VANISHED})
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


def _check_missing(body: Body) -> Iterator[Finding]:
    schedule = body["schedule"]
    if schedule["missing"] and _live_generation(body) is not None:
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


def _check_failed(body: Body) -> Iterator[Finding]:
    failed_night = next((night for night in body["nights"] if night["failure"]), None)
    if failed_night is not None:
        failure, generation = failed_night["failure"], failed_night["generation"]
        at = datetime.fromtimestamp(failure["at"], UTC)
        yield Finding(
            "warn",
            f"The last night failed at {at:%Y-%m-%d %H:%M} UTC in the step {failure['step']}"
            f"{f' ({generation})' if generation else ''}: {failure['error'].rstrip('.')}; what is live stays.",
            "Mend that, then run larder night again, or clear the red task.",
        )


def _check_refused(body: Body) -> Iterator[Finding]:
    # One of the live one's cut is no older, wherever its digest sorts it.
    cut = (_live_generation(body) or "")[:CUT_CHARS]
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


def _check_apart(body: Body) -> Iterator[Finding]:
    served_generations = sorted(
        {replica["generation"] for replica in body["replicas"] if replica["generation"]}
    )
    if len(served_generations) > 1:
        yield Finding(
            "warn",
            f"Replicas answer from {len(served_generations)} generations: {', '.join(served_generations)}.",
            "A flip takes a second; if it lasts, restart the replicas that stayed behind.",
        )


def _check_fallback(body: Body) -> Iterator[Finding]:
    recent_share = _share_of_sources(body["lately"]["answers"], FALLBACK_SOURCES)
    earlier_share = _share_of_sources(body["earlier"]["answers"], FALLBACK_SOURCES) or 0.0
    if recent_share is not None and recent_share - earlier_share >= FALLBACK_SURGE:
        level: Level = "bad" if recent_share - earlier_share >= FALLBACK_SURGE_BAD else "warn"
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


def _check_hits(body: Body) -> Iterator[Finding]:
    recent_share, earlier_share = (
        _share_of_sources(body["lately"]["answers"], STORED_SOURCES),
        _share_of_sources(body["earlier"]["answers"], STORED_SOURCES),
    )
    if (
        recent_share is not None
        and earlier_share is not None
        and earlier_share - recent_share >= HIT_RATE_DROP
    ):
        yield Finding(
            "warn",
            f"The hit rate fell to {recent_share:.1%} from {earlier_share:.1%}.",
            "Look at the miss reasons; after a restart or a flip it comes back by itself within minutes.",
        )


def _check_degraded(body: Body) -> Iterator[Finding]:
    degraded_reasons = sorted(
        {replica["degraded"] for replica in body["replicas"] if replica["degraded"]}
    )
    if degraded_reasons:
        yield Finding(
            "warn",
            f"The live model does not work ({degraded_reasons[0]}): ids the night does not know get defaults.",
            "Roll back (larder roll-back), then look at the bundle.",
        )


def _check_memory(body: Body) -> Iterator[Finding]:
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


def _check_policy(body: Body) -> Iterator[Finding]:
    policy = body["redis"]["policy"]
    if policy and policy.startswith("allkeys"):
        yield Finding(
            "bad",
            f"Redis may evict published pages: its maxmemory-policy is {policy}.",
            "Set maxmemory-policy volatile-lru.",
        )


def _check_shed(body: Body) -> Iterator[Finding]:
    entities, shed = sum(body["lately"]["answers"].values()), body["queue"]["shed_lately"]
    if shed and shed >= 0.01 * max(entities, 1):
        yield Finding(
            "warn",
            f"Overload: {shed} inferences or requests were left out in the last minutes.",
            "Add workers or replicas (LARDER_WORKERS); the load is more than these can answer in time.",
        )


def _check_events(body: Body) -> Iterator[Finding]:
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
            _STREAM_ADVICE,
        )
    elif (full := _part(events["stream_bytes"], events["stream_max_bytes"])) >= STREAM_WARN:
        yield Finding("warn", f"The stream of events is {full:.0%} full.", _STREAM_ADVICE)
    if EVENTS_BEHIND in _stale_words(body):
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
    if of >= ANSWERS_MIN and (rejected_share := sum(rejected.values()) / of) >= REJECTED_WARN:
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
    _check_ready, _check_redis, _check_pointer, _check_missing, _check_policy, _check_fallback, _check_memory,
    _check_stale, _check_apart, _check_hits, _check_failed, _check_refused, _check_degraded, _check_shed, _check_events,
)  # fmt: skip
