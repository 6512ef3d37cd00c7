"""OpenAPI schema of the dashboard's document. Pure data."""

from serving.answers.named_schema import DETAILS, Json, NamedSchema, or_null

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
_REUSE = _object(
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
_EVENTS = _object(
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
        latency=_by_name("Latency", "Quantiles in seconds by source", DETAILS),
    ),
    earlier=_object("Earlier", "The hour before that", answers=_ANSWERS),
    totals=_object(
        "Totals", "Since the start of each worker that runs: the sums of what /metrics tells on every replica",
        requests={"type": "integer"}, answers=_ANSWERS, misses=_COUNTS, entities={"type": "integer"},
    ),
    generations=_list(
        _object(
            "Generation", "Newest first",
            generation={"type": "string"}, state=_maybe("string"), epoch=_maybe("integer"),
            role=_maybe("string", "Of those that this replica holds"), published_at=_maybe("number"),
            data_until=_maybe("number"), bytes=_maybe("integer"), records=_maybe("integer"),
            gates=_list(DETAILS), reason=_maybe("string"),
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
            "Night", "Newest first",
            generation={"type": "string"}, outcome={"type": "string"}, began_at=_maybe("number"),
            steps=_list(DETAILS),
            reuse=or_null(_REUSE),
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
    advisor={**or_null(DETAILS), "description": "Of all workers together, each counted by its reads"},
    quality=or_null(DETAILS),
    events=or_null(_EVENTS),
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
                        DETAILS,
                    ),
                )
            ),
        )
    ),
)  # fmt: skip
