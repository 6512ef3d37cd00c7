"""The document of `GET /dashboard/data`: its schema, its fields, and the verdict in one sentence. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from cache.format.manifest import CUT_CHARS
from cache.format.stream_position import Position
from cache.store.artefacts import NO_MANIFEST_WORDS
from cache.tiers.reads import MissReason
from cache.traffic.experiments import rate_ratio
from serving.dashboard import counters
from serving.dashboard.aggregator import RECENT_BIN_COUNT, DrawnBin, FleetReading, build_series, quantiles_by_source
from serving.dashboard.counters import BIN_S, merge_event_rows, merged_counts
from serving.events.counts import (
    ACCEPTED,
    CHANGED_PPM_FIELD,
    COMPARED_LISTS_FIELD,
    ERASED,
    NEWER_EVENT_ANSWERS_FIELD,
    REFUSAL_PREFIX,
    REPEATED,
    RESULT_PREFIX,
)
from serving.events.follower import EVENTS_BEHIND
from serving.generations.nights import redis_used_and_max_bytes
from serving.generations.store_watch import FILES_INTERVAL_S
from serving.requests.answers import FALLBACK_SOURCES, STORED_SOURCES, Source
from serving.requests.named_schema import DETAILS_SCHEMA, Json, NamedSchema, nullable_schema
from serving.requests.reasons import StaleReason
from serving.traffic.router import ARM_FEEDBACK_PREFIX, ARM_REQUESTS_PREFIX

Level = Literal["ok", "warn", "bad"]

Body = Mapping[str, Any]

Worker = Mapping[str, Any]

SETTLED_S = 3.0
"""Seconds after its end until a bin is shown; by then every worker has published its part."""

ANSWERS_MIN = 200
"""Smallest number of answers from which a share is computed."""

HIT_RATE_DROP = 0.10
"""Drop of the hit rate from the hour before to the last five minutes that causes a warning."""

FALLBACK_SURGE = 0.05
"""Rise of the share of answers from `previous` and `default` over the hour before that causes a warning."""

FALLBACK_SURGE_BAD = 0.30

MEMORY_WARN, MEMORY_BAD = 0.90, 0.98
"""Shares of Redis' maxmemory in use from which the verdict is `warn` and `bad`."""

STREAM_WARN = 0.8
"""Used share of the event stream's byte limit from which the verdict is `warn`."""

INBOX_WARN_S = 60
"""Seconds that events may wait in the inbox; another consumer claims the entries of a dead one after 30 s."""

REJECTED_WARN = 0.05
"""Share of rejected events from which the verdict is `warn`; events of erased users are not included."""

_STREAM_ADVICE = (
    "A night makes room: larder night. If it fills up again, raise [events] stream_bytes and its Redis' maxmemory."
)

_RESTORE_ADVICE = "larder status shows the pointer; larder restore rebuilds it from the records."

_READ_ADVICE = "Read the log of {replicas}: is the artefact store reachable and readable from there?"

_ADVICE_BY_STALE_REASON: Mapping[str, str] = {
    StaleReason.BLOCKLIST_UNREADABLE: f"{_READ_ADVICE} If the log says that a newer version is in force, the store is "
    "older than what is in force: repeat the blocks and erasures since the copy (larder block --list and larder erase "
    "--list with LARDER_ARTIFACTS=FOLDER of the store that was replaced show them), then restart the replicas; or put "
    "back a newer copy.",
    StaleReason.BLOCKLIST_NOT_ENFORCED: "Read the log of {replicas}: it needs threads and memory, and tries again by "
    "itself.",
    StaleReason.EXPERIMENTS_UNREADABLE: _READ_ADVICE,
    StaleReason.LOAD_FAILED: "Read the log of {replicas}; larder roll-back returns to the last good generation.",
    StaleReason.EVICTION_POLICY: "Set maxmemory-policy volatile-lru.",
    StaleReason.BACKGROUND_FAILING: "Restart {replicas}, and report the traceback in its log.",
    StaleReason.POINTER_BACKWARDS: _RESTORE_ADVICE,
    StaleReason.POINTER_CONFLICTING: _RESTORE_ADVICE,
    StaleReason.POINTER_CORRUPT: _RESTORE_ADVICE,
}
"""What to do about stale answers, the most urgent reason first; `replicas` are those with the reason."""

_NUMBERS_SCHEMA: Json = {"type": "array", "items": {"type": ["number", "null"]}}

_SERIES_BY_NAME_SCHEMA = NamedSchema(
    "SeriesByName",
    {
        "type": "object",
        "description": "By name: one value per step of time, null if unknown",
        "additionalProperties": _NUMBERS_SCHEMA,
    },
)

_COUNTS_SCHEMA = NamedSchema(
    "Counts", {"type": "object", "description": "Counts by name", "additionalProperties": {"type": "integer"}}
)


def _object_schema(schema_name: str, description: str, /, **properties: Json) -> NamedSchema:
    return NamedSchema(
        f"Dashboard{schema_name}", {"type": "object", "description": description, "properties": properties}
    )


def _by_name_schema(schema_name: str, description: str, value_schema: Json) -> NamedSchema:
    return NamedSchema(
        f"Dashboard{schema_name}", {"type": "object", "description": description, "additionalProperties": value_schema}
    )


def _nullable_schema(type_name: str, description: str = "") -> Json:
    return {"type": [type_name, "null"]} | ({"description": description} if description else {})


def _list_schema(element_schema: Json) -> Json:
    return {"type": "array", "items": element_schema}


_ANSWER_COUNTS_SCHEMA = _by_name_schema("AnswerCounts", "Counts of answers by source", {"type": "integer"})

_REUSE_SCHEMA = _object_schema(
    "Reuse",
    "Users by reason (copied; computed for their inputs, for an item lost, for one that may enter), "
    "the share copied and the seconds of scoring saved; null if the night did not record them",
    users=_COUNTS_SCHEMA, share=_nullable_schema("number"), spared_s={"type": "number"},
    base=_nullable_schema("string"), why={"type": "string"}, read_because={"type": "string"},
    lately=_object_schema(
        "RecentReuse",
        "Up to 14 nights ending with this one: sum of users, mean of the seconds",
        nights={"type": "integer"}, users=_COUNTS_SCHEMA, share=_nullable_schema("number"),
        spared_s={"type": "number"},
    ),
)  # fmt: skip

_EVENTS_SCHEMA = _object_schema(
    "Events",
    "Events of the last minutes; states are the worst of all workers; null if the service takes no events",
    up=_nullable_schema("boolean", "Whether the Redis of events answers, writes, and is as durable as demanded"),
    durability=_nullable_schema("string"), demanded=_nullable_schema("string"),
    results=_COUNTS_SCHEMA, refused=_COUNTS_SCHEMA,
    answers={"type": "integer", "description": "Answers with newer events"},
    answers_share=_nullable_schema("number"),
    list_change=_nullable_schema("number", "Share of their items that are not in the night's lists"),
    lag_s=_nullable_schema("number"), users=_nullable_schema("number"), held_bytes=_nullable_schema("number"),
    held_max_bytes=_nullable_schema("number"), stream_bytes=_nullable_schema("number"),
    stream_max_bytes=_nullable_schema("number"), stream_length=_nullable_schema("number"),
    inbox_length=_nullable_schema("number"), inbox_lag_seconds=_nullable_schema("number"),
    writes_refused=_nullable_schema("string", "Why the Redis of events refuses to write; null: it does not refuse"),
    counted_until=_nullable_schema("string", "Position up to which answers count all events"),
    taken_until=_nullable_schema("string", "Position up to which some generation has all events"),
    published_until=_nullable_schema("string", "Position up to which the live generation has all events"),
)  # fmt: skip

DASHBOARD_SCHEMA: Json = _object_schema(
    "Document",
    "Counts and state of all replicas, at most a second old; times are Unix seconds of Redis' clock; null: unknown",
    now={"type": "number"},
    whole={"type": "boolean", "description": "false: the numbers are those of one worker only"},
    trouble=_nullable_schema("string", "Why the document covers only one worker"),
    verdict=_object_schema(
        "Verdict", "Whether all is well",
        level={"type": "string", "enum": ["ok", "warn", "bad"]},
        sentence={"type": "string"},
        advice=_nullable_schema("string", "What to do"),
        also=_list_schema({"type": "string"}),
    ),
    replicas=_list_schema(
        _object_schema(
            "Replica", "The workers of one parent",
            replica={"type": "string"}, workers={"type": "integer"}, generation=_nullable_schema("string"),
            epoch=_nullable_schema("integer"), ready={"type": "boolean"}, stale=_nullable_schema("string"),
            degraded=_nullable_schema("string"), seen_s={"type": "number"}, failed=_nullable_schema("string"),
            tokens_stale=_nullable_schema("string", "Why its changed tokens file is not applied"),
            tls_stale=_nullable_schema("string", "Why changed TLS files are unused, or its certificate is invalid"),
            store_problem=_nullable_schema("string", "What is wrong with its artefact store"),
            canary_problem=_nullable_schema("string", "Why it does not hold the canary that runs"),
        )
    ),
    series=_object_schema(
        "Series", "The last hour in steps of `step_s`, oldest first; quantiles are off by 5 % at most",
        step_s={"type": "integer"}, at=_NUMBERS_SCHEMA, requests=_NUMBERS_SCHEMA, answers=_SERIES_BY_NAME_SCHEMA,
        seconds=_by_name_schema("LatencySeries", "Quantiles in seconds by source", _SERIES_BY_NAME_SCHEMA),
        stages=_SERIES_BY_NAME_SCHEMA, misses=_SERIES_BY_NAME_SCHEMA, events=_SERIES_BY_NAME_SCHEMA,
    ),
    lately=_object_schema(
        "Lately", "Sums over the last `seconds`",
        seconds={"type": "integer"}, requests={"type": "integer"}, answers=_ANSWER_COUNTS_SCHEMA, misses=_COUNTS_SCHEMA,
        latency=_by_name_schema("Latency", "Quantiles in seconds by source", DETAILS_SCHEMA),
    ),
    earlier=_object_schema("Earlier", "The hour before `lately`", answers=_ANSWER_COUNTS_SCHEMA),
    totals=_object_schema(
        "Totals", "Counts since the start of each running worker: sums over `/metrics` of all replicas",
        requests={"type": "integer"}, answers=_ANSWER_COUNTS_SCHEMA, misses=_COUNTS_SCHEMA,
        entities={"type": "integer"},
    ),
    generations_at=_nullable_schema("number", "When generations and nights were read"),
    generations=_list_schema(
        _object_schema(
            "Generation", "Newest first",
            generation={"type": "string"}, state=_nullable_schema("string"), epoch=_nullable_schema("integer"),
            role=_nullable_schema("string", "Role on this replica, if held"), published_at=_nullable_schema("number"),
            data_until=_nullable_schema("number"), bytes=_nullable_schema("integer"),
            records=_nullable_schema("integer"),
            gates=_list_schema(DETAILS_SCHEMA), reason=_nullable_schema("string"),
            remarks=_list_schema({"type": "string"}),
            events_until=_nullable_schema("string", "Position up to which the generation has all events"),
        )
    ),
    schedule=_object_schema(
        "Schedule", "When a generation should exist",
        age_s=_nullable_schema("number"), due_at={"type": "number"}, missing={"type": "boolean"},
    ),
    nights=_list_schema(
        _object_schema(
            "Night",
                "Newest first. A failed night comes first until its step succeeds or a night is done; its "
                "generation is empty if it failed before it had one",
            generation={"type": "string"}, outcome={"type": "string"}, began_at=_nullable_schema("number"),
            steps=_list_schema(DETAILS_SCHEMA),
            reuse=nullable_schema(_REUSE_SCHEMA),
            failure=nullable_schema(
                _object_schema(
                    "NightFailure", "Step that failed, when, and why",
                    step={"type": "string"}, at={"type": "number"}, error={"type": "string"},
                )
            ),
        )
    ),
    redis=_object_schema(
        "Redis", "All nodes together",
        used_bytes=_nullable_schema("integer"), limit_bytes=_nullable_schema("integer"),
        policy=_nullable_schema("string"), clients=_nullable_schema("integer"), evicted=_nullable_schema("integer"),
    ),
    breakers=_COUNTS_SCHEMA,
    queue=_object_schema(
        "Queue", "All workers together; `queue_seconds` of the slowest",
        live_queued={"type": "integer", "description": "Inputs that wait for live inference"},
        under_way={"type": "integer", "description": "Requests that are being answered"},
        requests_max={"type": "integer", "description": "Requests that may be under way"},
        queue_seconds={"type": "number", "description": "How long a request waits for its turn"},
        shed={"type": "integer", "description": "What was refused or left out since the start of each running worker"},
        shed_lately={"type": "integer", "description": "Of these, over the last `seconds` of `lately`"},
    ),
    l1=_object_schema(
        "L1", "All workers together",
        bytes={"type": "integer"}, budget_bytes={"type": "integer"}, entries={"type": "integer"},
    ),
    advisor={**nullable_schema(DETAILS_SCHEMA), "description": "L1 advice: curves of all workers, weighted by reads"},
    quality=nullable_schema(DETAILS_SCHEMA),
    events=nullable_schema(_EVENTS_SCHEMA),
    experiments=_list_schema(
        _object_schema(
            "Experiment", "Experiments that have not ended",
            experiment={"type": "string"}, share={"type": "number"}, started_at=_nullable_schema("number"),
            arms=_list_schema(
                _object_schema(
                    "Arm", "Control first; counts since the start of each running worker",
                    arm={"type": "string"}, namespace={"type": "string"}, share={"type": "number"},
                    generation=_nullable_schema("string", "Live generation there, as far as this replica knows"),
                    requests={"type": "integer"},
                    events=_by_name_schema(
                        "ArmEvents",
                        "By name: count, rate per request, and its ratio to the control's with bounds",
                        DETAILS_SCHEMA,
                    ),
                )
            ),
        )
    ),
)  # fmt: skip


def build_document(
    reading: FleetReading,
    *,
    schedule_fields: Mapping[str, Any],
    generation_and_night_rows: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    generation_by_role: Mapping[str, str],
    bucket_bounds: Sequence[float],
    advisor_fields: Mapping[str, Any] | None,
    quality_fields: Mapping[str, Any] | None,
    experiment_rows: Sequence[Mapping[str, Any]] = (),
    generations_read_at: float | None = None,
) -> dict[str, Any]:
    """Build the document; `generation_by_role` maps each role to the generation that this replica holds in it.

    `experiment_rows` are the experiments that this replica holds, each with its arms, control first.
    """
    workers = [reading.worker_rows[worker_name] for worker_name in sorted(reading.worker_rows)]
    end_bin_start = int((reading.read_at - SETTLED_S) // BIN_S) * BIN_S
    recent_counts = merged_counts(reading.recent_counts_by_start.values())
    total_counts = merged_counts(worker["counts"] or {} for worker in workers)
    role_by_generation = {generation: role for role, generation in generation_by_role.items()}
    generation_rows, nights = generation_and_night_rows
    generations = [
        {**generation_row, "role": role_by_generation.get(generation_row["generation"])}
        for generation_row in generation_rows
    ]
    body: dict[str, Any] = {
        "now": reading.read_at,
        "whole": reading.trouble_text is None,
        "trouble": reading.trouble_text,
        "replicas": summarise_replicas(workers, reading.read_at),
        "series": build_series(reading.bin_by_start, end_bin_start),
        "lately": {
            "seconds": RECENT_BIN_COUNT * BIN_S,
            "requests": recent_counts.get(counters.REQUESTS_FIELD, 0),
            "answers": _answers_by_source(recent_counts),
            "misses": counters.counts_of_kind(recent_counts, counters.MISS_PREFIX),
            "latency": quantiles_by_source(recent_counts, bucket_bounds),
        },
        "earlier": {"answers": _earlier_answers(reading.bin_by_start, reading.recent_counts_by_start)},
        "totals": {
            "requests": total_counts.get(counters.REQUESTS_FIELD, 0),
            "answers": _answers_by_source(total_counts),
            "misses": counters.counts_of_kind(total_counts, counters.MISS_PREFIX),
            "entities": total_counts.get(counters.ENTITIES_FIELD, 0),
        },
        "generations_at": generations_read_at,
        "generations": generations,
        "schedule": dict(schedule_fields),
        "nights": list(nights),
        "redis": summarise_redis(reading.redis_infos),
        "breakers": {"closed": 0, "half_open": 0, "open": 0} | Counter(str(worker["breaker"]) for worker in workers),
        "queue": {
            "live_queued": _sum_field(workers, "live_queued"),
            "under_way": _sum_field(workers, "under_way"),
            "requests_max": _sum_field(workers, "requests_max"),
            "queue_seconds": max((worker["queue_seconds"] or 0.0 for worker in workers), default=0.0),
            "shed": total_counts.get(counters.SHED_FIELD, 0),
            "shed_lately": recent_counts.get(counters.SHED_FIELD, 0),
        },
        "l1": {
            "bytes": _sum_field(workers, "l1_bytes"),
            "budget_bytes": _sum_field(workers, "l1_budget_bytes"),
            "entries": _sum_field(workers, "l1_entries"),
        },
        "advisor": advisor_fields,
        "quality": quality_fields,
        "experiments": experiments_with_counts(experiment_rows, total_counts),
        "events": summarise_events(workers, recent_counts, generations),
    }
    return {**body, "verdict": build_verdict(body)}


def _answers_by_source(count_by_field: Mapping[str, int]) -> dict[str, int]:
    return {source.value: count_by_field.get(counters.ANSWER_PREFIX + source, 0) for source in Source}


def _earlier_answers(bin_by_start: Mapping[int, DrawnBin], recent_counts_by_start: Mapping[int, Any]) -> dict[str, int]:
    """Return answers by source in the bins before those of `recent_counts_by_start`."""
    answer_counts = Counter[str]()
    for bin_start, drawn_bin in bin_by_start.items():
        if bin_start not in recent_counts_by_start:
            answer_counts.update(drawn_bin.answer_count_by_source)
    return {source.value: answer_counts[source] for source in Source}


def _sum_field(workers: Iterable[Worker], field_name: str) -> int:
    return sum(worker[field_name] or 0 for worker in workers)


def summarise_replicas(workers: Iterable[Worker], now_s: float) -> list[dict[str, Any]]:
    """Summarise the workers of each replica (one parent process): its state is that of its worst worker."""
    workers_by_replica: dict[str, list[Worker]] = {}
    for worker in workers:
        workers_by_replica.setdefault(str(worker["replica"]), []).append(worker)
    replica_rows = []
    for replica_name, replica_workers in sorted(workers_by_replica.items()):
        oldest_epoch_worker = min(replica_workers, key=lambda worker: worker["epoch"] or 0)
        replica_rows.append(
            {
                "replica": replica_name,
                "workers": len(replica_workers),
                "generation": oldest_epoch_worker["generation"],
                "epoch": oldest_epoch_worker["epoch"],
                "ready": all(worker["ready"] for worker in replica_workers),
                "stale": _first_set_value(replica_workers, "stale"),
                "degraded": _first_set_value(replica_workers, "degraded"),
                "seen_s": round(max(max(0.0, now_s - worker["at"]) for worker in replica_workers), 3),
                "failed": _first_set_value(replica_workers, "failed"),
                "tokens_stale": _first_set_value(replica_workers, "tokens_stale"),
                "tls_stale": _first_set_value(replica_workers, "tls_stale"),
                "store_problem": _first_set_value(replica_workers, "store_problem"),
                "canary_problem": _first_set_value(replica_workers, "canary_problem"),
            }
        )
    return replica_rows


def _first_set_value(replica_workers: Iterable[Worker], field_name: str) -> str | None:
    return next((worker[field_name] for worker in replica_workers if worker[field_name]), None)


def summarise_events(
    workers: Iterable[Worker], recent_counts: Mapping[str, int], generation_rows: Iterable[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Summarise events from all workers' rows and `recent_counts`; None if the service takes no events.

    `taken_until` is the newest position of any generation, published or not.
    """
    events_overview = merge_event_rows([worker.get("events") for worker in workers])
    if events_overview is None:
        return None
    answer_count = sum(counters.counts_of_kind(recent_counts, counters.ANSWER_PREFIX).values())
    newer_answer_count, compared_list_count = (
        recent_counts.get(NEWER_EVENT_ANSWERS_FIELD, 0),
        recent_counts.get(COMPARED_LISTS_FIELD, 0),
    )
    taken_positions = [
        events_until
        for generation_row in generation_rows
        if (events_until := generation_row.get("events_until")) is not None
    ]
    return {
        **events_overview,
        "results": counters.counts_of_kind(recent_counts, RESULT_PREFIX),
        "refused": counters.counts_of_kind(recent_counts, REFUSAL_PREFIX),
        "answers": newer_answer_count,
        "answers_share": newer_answer_count / answer_count if answer_count else None,
        "list_change": recent_counts.get(CHANGED_PPM_FIELD, 0) / (1e6 * compared_list_count)
        if compared_list_count
        else None,
        "taken_until": max(taken_positions, key=Position.parse, default=None),
    }


def summarise_redis(redis_infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return memory, clients and evictions, summed over a cluster's nodes, and the worst of their eviction policies."""
    if not redis_infos:
        return dict.fromkeys(("used_bytes", "limit_bytes", "policy", "clients", "evicted"))
    policies = [str(info.get("maxmemory_policy", "")) for info in redis_infos]
    used_bytes, limit_bytes = redis_used_and_max_bytes(redis_infos)
    return {
        "used_bytes": used_bytes,
        "limit_bytes": limit_bytes or None,
        "policy": next((policy for policy in policies if policy.startswith("allkeys")), policies[0]) or None,
        "clients": sum(int(info.get("connected_clients", 0)) for info in redis_infos),
        "evicted": sum(int(info.get("evicted_keys", 0)) for info in redis_infos),
    }


def experiments_with_counts(
    experiment_rows: Sequence[Mapping[str, Any]], total_counts: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return experiments with the counts of all running workers; `experiment_rows` names arms, the control first.

    Counts from before a worker's start are in `larder experiment status`.
    """
    request_count_by_arm = counters.counts_of_kind(total_counts, ARM_REQUESTS_PREFIX)
    event_counts_by_arm = _events_by_arm(counters.counts_of_kind(total_counts, ARM_FEEDBACK_PREFIX))
    return [
        {
            **experiment_row,
            "arms": [
                _arm_row(
                    experiment_row["experiment"], experiment_row["arms"], arm, request_count_by_arm, event_counts_by_arm
                )
                for arm in experiment_row["arms"]
            ],
        }
        for experiment_row in experiment_rows
    ]  # fmt: skip


def _events_by_arm(count_by_arm_and_event: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return counts of reported events by arm and event."""
    event_counts_by_arm: dict[str, dict[str, int]] = {}
    for arm_and_event, count in count_by_arm_and_event.items():
        arm, _, event_name = arm_and_event.rpartition("=")
        event_counts_by_arm.setdefault(arm, {})[event_name] = count
    return event_counts_by_arm


def _arm_row(
    experiment_name: str,
    experiment_arms: Sequence[Mapping[str, Any]],
    arm: Mapping[str, Any],
    request_count_by_arm: Mapping[str, int],
    event_counts_by_arm: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    control_key, arm_key = (f"{experiment_name}={compared_arm['arm']}" for compared_arm in (experiment_arms[0], arm))
    control_counts, arm_counts = event_counts_by_arm.get(control_key, {}), event_counts_by_arm.get(arm_key, {})
    figures_by_event = {}
    for event_name in sorted({*control_counts, *arm_counts}):
        count_and_requests = (arm_counts.get(event_name, 0), request_count_by_arm.get(arm_key, 0))
        ratio = None
        if arm_key != control_key:
            ratio = rate_ratio(
                *count_and_requests, control_counts.get(event_name, 0), request_count_by_arm.get(control_key, 0)
            )
        figures_by_event[event_name] = {
            "count": count_and_requests[0],
            "rate": count_and_requests[0] / count_and_requests[1] if count_and_requests[1] else None,
            "ratio": None if ratio is None else ratio._asdict(),
        }
    return {**arm, "requests": request_count_by_arm.get(arm_key, 0), "events": figures_by_event}


class Finding(NamedTuple):
    """A problem: its level, a sentence for people, and advice."""

    level: Level
    sentence: str
    advice: str


def build_verdict(body: Body) -> dict[str, Any]:
    """Return level, sentence and advice of the worst finding; `also` has the sentences of the others, worst first."""
    findings = sorted(
        (finding for check in _CHECKS for finding in check(body)), key=lambda finding: finding.level != "bad"
    )
    if not findings:
        return {"level": "ok", "sentence": _well_sentence(body), "advice": None, "also": []}
    worst_finding = findings[0]
    return {
        "level": worst_finding.level, "sentence": worst_finding.sentence, "advice": worst_finding.advice,
        "also": [finding.sentence for finding in findings[1:]],
    }  # fmt: skip


def _well_sentence(body: Body) -> str:
    live_generation, cache_share = (
        _live_generation(body),
        _share_of_sources(body["lately"]["answers"], STORED_SOURCES),
    )
    sentence_parts = [f"generation {live_generation} is live on {_count_text(len(body['replicas']), 'replica')}"]
    if cache_share is not None:
        sentence_parts.append(f"{cache_share:.1%} of the answers of the last minutes came from the cache")
    return f"All is well: {' and '.join(sentence_parts)}."


def _live_generation(body: Body) -> str | None:
    return next((replica["generation"] for replica in body["replicas"] if replica["generation"]), None)


def _share_of_sources(answer_count_by_source: Mapping[str, int], source_names: Sequence[str]) -> float | None:
    answer_count = sum(answer_count_by_source.values())
    return (
        sum(answer_count_by_source.get(source, 0) for source in source_names) / answer_count
        if answer_count >= ANSWERS_MIN
        else None
    )


def _count_text(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _check_ready(body: Body) -> Iterator[Finding]:
    unready_replicas = [replica for replica in body["replicas"] if not replica["ready"]]
    if unready_replicas:
        failure_text = next((replica["failed"] for replica in unready_replicas if replica["failed"]), "see /readyz")
        replica_of_other_store = next(
            (
                unready_replica["replica"]
                for unready_replica in unready_replicas
                if NO_MANIFEST_WORDS in (unready_replica["failed"] or "")
            ),
            None,
        )
        if replica_of_other_store is not None:
            advice = (
                f"{replica_of_other_store} uses another artefact store: correct its LARDER_ARTIFACTS. If that is "
                "right, the files are lost: run larder night."
            )
        elif all(replica["generation"] is None for replica in unready_replicas):
            advice = "Publish a generation: run larder night."
        else:
            replica_name = unready_replicas[0]["replica"]
            advice = f"Read the log of {replica_name}; larder roll-back returns to the last good generation."
        share_text = f"{len(unready_replicas)} of {_count_text(len(body['replicas']), 'replica')}"
        yield Finding("bad", f"{share_text} not ready: {failure_text.rstrip('.')}.", advice)


def _check_redis(body: Body) -> Iterator[Finding]:
    if not body["whole"]:
        yield Finding(
            "bad",
            f"Redis cannot be reached ({str(body['trouble']).rstrip('.')}): answers come from L1, the live model and "
            "defaults, and these figures are of one worker only.",
            "Start Redis again or repair the network; if it came back empty, run larder restore.",
        )
    elif open_breaker_count := body["breakers"].get("open", 0) + body["breakers"].get("half_open", 0):
        yield Finding(
            "bad",
            f"{_count_text(open_breaker_count, 'worker')} stopped using Redis after failures (breaker open).",
            "Look at Redis' latency (LATENCY LATEST, SLOWLOG GET) and at the network of those replicas.",
        )


def _check_pointer(body: Body) -> Iterator[Finding]:
    # Without Redis this is unknown, and another check reports the outage.
    if body["whole"] and StaleReason.POINTER_VANISHED in _stale_reasons(body):
        yield Finding(
            "bad",
            "Redis lost its pointer, and so perhaps all pages.",
            "Run larder restore: it loads pages and pointer from the artefact store again.",
        )


def _check_stale(body: Body) -> Iterator[Finding]:
    reasons = sorted(_stale_reasons(body) - {EVENTS_BEHIND, StaleReason.POINTER_VANISHED})
    # Another check reports that Redis is unreachable.
    if body["whole"] and reasons:
        worst_reason = next((reason for reason in _ADVICE_BY_STALE_REASON if reason in reasons), reasons[0])
        replica_names = [
            replica["replica"] for replica in body["replicas"] if worst_reason in (replica["stale"] or "").split(",")
        ]
        yield Finding(
            "warn",
            f"Answers may lag behind what was published: {', '.join(reasons)}.",
            _ADVICE_BY_STALE_REASON.get(worst_reason, _RESTORE_ADVICE).format(replicas=", ".join(replica_names)),
        )


def _stale_reasons(body: Body) -> set[str]:
    stale_texts = [replica["stale"] for replica in body["replicas"] if replica["stale"]]
    return {stale_reason for stale_text in stale_texts for stale_reason in stale_text.split(",")}


def _check_missing(body: Body) -> Iterator[Finding]:
    schedule = body["schedule"]
    if schedule["missing"] and _live_generation(body) is not None:
        age_text = "" if schedule["age_s"] is None else f": the served generation is {_age_text(schedule['age_s'])} old"
        yield Finding(
            "bad",
            f"The last night brought no generation{age_text}.",
            "Look at the last run of the DAG, or run larder night.",
        )


def _check_failed(body: Body) -> Iterator[Finding]:
    failed_night = next((night for night in body["nights"] if night["failure"]), None)
    if failed_night is not None:
        failure, generation = failed_night["failure"], failed_night["generation"]
        failed_at = datetime.fromtimestamp(failure["at"], UTC)
        yield Finding(
            "warn",
            f"The last night failed at {failed_at:%Y-%m-%d %H:%M} UTC in the step {failure['step']}"
            f"{f' ({generation})' if generation else ''}: {failure['error'].rstrip('.')}; the live generation stays.",
            "Fix the cause, then run larder night again, or clear the failed task.",
        )


def _check_refused(body: Body) -> Iterator[Finding]:
    # Names begin with the cut: a refused generation with the live one's cut is not older, whatever its digest.
    live_cut = (_live_generation(body) or "")[:CUT_CHARS]
    refused_generations = (generation for generation in body["generations"] if generation["state"] == "refused")
    newest_refused = next(
        (generation for generation in refused_generations if generation["generation"][:CUT_CHARS] >= live_cut), None
    )
    if newest_refused is not None:
        failed_rules = [gate["rule"] for gate in newest_refused["gates"] if gate["verdict"] == "failed"]
        yield Finding(
            "warn",
            f"Generation {newest_refused['generation']} was refused by {', '.join(failed_rules) or 'a gate'}, the "
            "live generation stays.",
            "Read the gate's reason below; if the generation is right nevertheless: larder override, then larder "
            "verify.",
        )


def _check_apart(body: Body) -> Iterator[Finding]:
    served_generations = sorted({replica["generation"] for replica in body["replicas"] if replica["generation"]})
    if len(served_generations) > 1:
        yield Finding(
            "warn",
            f"Replicas answer from {len(served_generations)} generations: {', '.join(served_generations)}.",
            "A flip takes a second; if this lasts longer, restart the replicas that did not follow.",
        )


def _check_fallback(body: Body) -> Iterator[Finding]:
    recent_share = _share_of_sources(body["lately"]["answers"], FALLBACK_SOURCES)
    earlier_share = _share_of_sources(body["earlier"]["answers"], FALLBACK_SOURCES) or 0.0
    if recent_share is not None and recent_share - earlier_share >= FALLBACK_SURGE:
        level: Level = "bad" if recent_share - earlier_share >= FALLBACK_SURGE_BAD else "warn"
        top_reason_and_count = max(
            body["lately"]["misses"].items(), key=lambda reason_and_count: reason_and_count[1], default=None
        )
        cause_text = "" if top_reason_and_count is None else f", mostly because of {top_reason_and_count[0]}"
        yield Finding(
            level,
            f"{recent_share:.1%} of the answers are from the previous generation or defaults ({earlier_share:.1%} "
            f"before){cause_text}.",
            "Run larder restore: it loads pages that Redis lacks from the artefact store again."
            if top_reason_and_count is not None and top_reason_and_count[0] == MissReason.PAGE_MISSING
            else "Look at the miss reasons and at live inference: queue, model, time-outs.",
        )


def _check_hits(body: Body) -> Iterator[Finding]:
    recent_share, earlier_share = (
        _share_of_sources(body["lately"]["answers"], STORED_SOURCES),
        _share_of_sources(body["earlier"]["answers"], STORED_SOURCES),
    )
    if recent_share is not None and earlier_share is not None and earlier_share - recent_share >= HIT_RATE_DROP:
        yield Finding(
            "warn",
            f"The hit rate fell to {recent_share:.1%} from {earlier_share:.1%}.",
            "Look at the miss reasons; after a restart or a flip the hit rate recovers by itself within minutes.",
        )


def _check_degraded(body: Body) -> Iterator[Finding]:
    degraded_reasons = sorted({replica["degraded"] for replica in body["replicas"] if replica["degraded"]})
    if degraded_reasons:
        yield Finding(
            "warn",
            f"The live model does not work ({degraded_reasons[0]}): ids that the night does not know get defaults.",
            "Roll back (larder roll-back), then look at the bundle.",
        )


def _check_files(body: Body) -> Iterator[Finding]:
    if replicas := [replica for replica in body["replicas"] if replica["tokens_stale"]]:
        yield Finding(
            "bad",
            f"Revoked tokens may still be valid on {', '.join(replica['replica'] for replica in replicas)}, new ones "
            f"are not: {replicas[0]['tokens_stale'].rstrip('.')}.",
            "Make the tokens file readable and valid (larder tokens list tells whether it is): it is read again within "
            "a second. A replica that restarts before that does not start.",
        )
    if replicas := [replica for replica in body["replicas"] if replica["tls_stale"]]:
        yield Finding(
            "warn",
            "An earlier certificate, or one that is not valid now, is sent by "
            f"{', '.join(replica['replica'] for replica in replicas)}: "
            f"{replicas[0]['tls_stale'].rstrip('.')}.",
            "Put a matching certificate and key in place, valid now (larder check tells whether they are): they are "
            "read again by themselves. A replica does not start with a certificate and key that do not match.",
        )


def _check_store(body: Body) -> Iterator[Finding]:
    if replicas := [replica for replica in body["replicas"] if replica["store_problem"]]:
        names = ", ".join(replica["replica"] for replica in replicas)
        yield Finding(
            "bad",
            f"The artefact store has a problem, says {names}: {replicas[0]['store_problem'].rstrip('.')}.",
            "Do what this says; larder check tells whether more is wrong with the store. Replicas look again within "
            f"{FILES_INTERVAL_S / 60:.0f} minutes.",
        )


def _check_canary(body: Body) -> Iterator[Finding]:
    if replicas := [replica for replica in body["replicas"] if replica["canary_problem"]]:
        names = ", ".join(replica["replica"] for replica in replicas)
        yield Finding(
            "warn",
            f"The canary's share is answered from the live generation by {names}: "
            f"{replicas[0]['canary_problem'].rstrip('.')}.",
            f"Read the log of {names}; larder canary abandon --reason REASON ends a canary that cannot be loaded.",
        )


def _check_memory(body: Body) -> Iterator[Finding]:
    redis_state = body["redis"]
    if not redis_state["limit_bytes"] or redis_state["used_bytes"] is None:
        return
    used_share = redis_state["used_bytes"] / redis_state["limit_bytes"]
    if used_share >= MEMORY_WARN:
        yield Finding(
            "bad" if used_share >= MEMORY_BAD else "warn",
            f"Redis is {used_share:.0%} full: the next generation may not fit.",
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
    answer_count, shed_count = sum(body["lately"]["answers"].values()), body["queue"]["shed_lately"]
    if shed_count and shed_count >= 0.01 * max(answer_count, 1):
        yield Finding(
            "warn",
            f"Overload: {shed_count} inferences or requests were shed in the last minutes.",
            "Add workers or replicas (LARDER_WORKERS); the load is more than these can answer in time.",
        )


def _check_events(body: Body) -> Iterator[Finding]:
    event_fields = body["events"]
    if event_fields is None:
        return
    if event_fields["up"] is False:
        found_durability, demanded = event_fields["durability"], event_fields["demanded"]
        # `durability` is from the last check: if it was sufficient then, or was never checked, the Redis is
        # unreachable.
        falls_short = demanded != "any" and found_durability not in (None, "always", demanded)
        shortfall = f"is less durable than demanded (found: {found_durability}, demanded: {demanded})"
        if (writes_refused := event_fields["writes_refused"]) is not None:
            cause = writes_refused.removeprefix("the Redis of events ")
        else:
            cause = shortfall if falls_short else "is unreachable"
        yield Finding(
            "bad",
            f"No events are accepted: their Redis {cause}.",
            "Run larder check for details. Producers must send again all events without a 202.",
        )
    if refused_count := event_fields["refused"].get("events_full"):
        yield Finding(
            "bad",
            f"The stream of events is full: events were refused {_count_text(refused_count, 'time')} in the last "
            "minutes.",
            _STREAM_ADVICE,
        )
    elif (
        stream_share := _share_of_total(event_fields["stream_bytes"], event_fields["stream_max_bytes"])
    ) >= STREAM_WARN:
        yield Finding("warn", f"The stream of events is {stream_share:.0%} full.", _STREAM_ADVICE)
    if EVENTS_BEHIND in _stale_reasons(body):
        memory_share = _share_of_total(event_fields["held_bytes"], event_fields["held_max_bytes"])
        yield Finding(
            "warn",
            f"Answers may lack accepted events: a worker is {event_fields['lag_s'] or 0:.1f} s behind, "
            f"its memory for events {memory_share:.0%} full.",
            "At 100 %, run larder night, which takes events over; otherwise read that replica's log.",
        )
    if (inbox_wait_s := event_fields["inbox_lag_seconds"] or 0) >= INBOX_WARN_S:
        yield Finding(
            "warn",
            f"Events have waited in the inbox for {inbox_wait_s:.0f} s.",
            "Look for dead consumers (XINFO CONSUMERS), and read the service's log.",
        )
    rejected_by_reason = {
        result_name: n
        for result_name, n in event_fields["results"].items()
        if result_name not in (ACCEPTED, REPEATED, ERASED)
    }
    event_count = sum(event_fields["results"].values())
    if (
        event_count >= ANSWERS_MIN
        and (rejected_share := sum(rejected_by_reason.values()) / event_count) >= REJECTED_WARN
    ):
        top_reason = max(rejected_by_reason, key=lambda reason: rejected_by_reason[reason])
        yield Finding(
            "warn",
            f"{rejected_share:.1%} of the events were rejected, mostly as {top_reason}.",
            "The stream of rejected events has the newest ones with their reasons: correct the producers.",
        )


def _share_of_total(part_amount: float | None, total_amount: float | None) -> float:
    return part_amount / total_amount if part_amount is not None and total_amount else 0.0


def _age_text(age_s: float) -> str:
    hours = age_s / 3600
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.1f} days"


_CHECKS: tuple[Callable[[Body], Iterator[Finding]], ...] = (
    _check_ready, _check_redis, _check_pointer, _check_missing, _check_policy, _check_fallback, _check_memory,
    _check_stale, _check_apart, _check_hits, _check_failed, _check_refused, _check_degraded, _check_shed, _check_events,
    _check_files, _check_store, _check_canary,
)  # fmt: skip
