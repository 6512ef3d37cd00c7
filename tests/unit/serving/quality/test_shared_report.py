"""What replicas tell of their answers' quality, and what one makes of it that is told otherwise."""

from typing import Any

import orjson
import pytest

from serving.quality.results import REPORT_TTL_S, QualityResults, SampleTotals, SharedReport
from serving.usage.table_usage import ReadHashes, TableUsage
from tests.fakes import FakeControl
from tests.unit.serving.world import World

NOW = 1_000_000.0


class FakeRedis(FakeControl):
    """One hash, and no reads."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    async def execute(self, *command: Any) -> Any:
        match command[0]:
            case "ZREVRANGE":
                return []
            case "HSET":
                self.rows[command[2].encode()] = command[3]
            case "HGETALL":
                return dict(self.rows)
            case "HDEL":
                for field_name in command[2:]:
                    del self.rows[field_name]
        return 0


def row(generation: str, **changes: Any) -> bytes:
    row_fields = {
        "replica": "b", "at": NOW, "hits": 1.0, "generation": generation, "since": NOW,
        "cells": {"t\tl1\tbatch\tnone": SampleTotals(sample_count=3, exact_count=3).to_json()}, "drift": {},
    }  # fmt: skip
    return orjson.dumps(row_fields | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"at": "now"},
        {"hits": "many"},
        {"since": None, "cells": None},
        {"cells": {"a": [1]}},
        {"cells": {"t\tl1\tbatch\tnone": ["1", 0, 0, 0, 0, 0, []]}},
        {"drift": 5},
        {"drift": {"t": 1}, "cells": []},
    ],
    ids=str,
)
async def test_a_row_told_otherwise_costs_neither_the_others_nor_the_page(changes: dict[str, Any]) -> None:
    world, redis, results = World(), FakeRedis(), QualityResults()
    live = world.snapshot()
    results.begin_release(live, NOW)
    usage = TableUsage(redis, ReadHashes(), world.metrics, lambda: (), lambda: live)
    shared_report = SharedReport(redis, "a", results, usage, lambda: live, lambda: NOW, 5.0)
    redis.rows = {
        b"b": row(live.generation),
        b"c": row(live.generation, replica="c", **changes),
        b"d": b"[1]",
        b"old": row(live.generation, replica="old", at=NOW - REPORT_TTL_S),
    }

    await shared_report.report()

    report = shared_report.to_json()
    assert report is not None and report["samples"] == 3
    assert b"old" not in redis.rows
