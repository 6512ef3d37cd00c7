"""Three experiments at once over thirty days, with a roll back in one arm, by seed."""

import io
import os
import random
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cache.l2.sync_clients import connect
from precompute.traffic.exposures import read_totals_by_arm
from tests.integration.experiments.thirty_days import ThirtyDays

STORM_SEEDS = 8


def a_seed() -> int:
    return int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 32))


async def live_through(
    seed: int, folder: Path, redis_url: str, *, keys: int, requests: int, nightly: float
) -> ThirtyDays:
    """Run all days, then compare the log with the requests."""
    print(f"seed {seed} (LARDER_SEED={seed} repeats it)")
    name = f"days-{uuid.uuid4().hex[:8]}"
    namespaces = tuple(f"{name}-{letter}" for letter in "abcd")
    with connect(redis_url, 5.0) as client:
        days = ThirtyDays(seed, folder, redis_url, client, namespaces, keys, requests, nightly)
        await days.run()
    print(dict(sorted(days.counts.items())))
    check_log(days)
    return days


def check_log(days: ThirtyDays) -> None:
    store = days.store_of(days.namespaces[0])
    exposures = []
    for experiment in ("first", "second", "third"):
        arm_totals = read_totals_by_arm(store, experiment)
        for arm, arm_total in arm_totals.items():
            assert arm_total.request_count == days.request_counts[experiment, arm]
            assert arm_total.count_by_feedback_event["click"] == days.clicked[experiment, arm]
        for file in store.names(f"exposures/{experiment}"):
            if file.endswith(".parquet"):
                raw = store.read(f"exposures/{experiment}/{file}")
                rows = pq.read_table(io.BytesIO(raw or b"")).to_pylist()
                hour = int(file.partition(".")[0])
                assert all(row["at"].timestamp() // 3_600 == hour for row in rows)
                exposures += [(experiment, hour, row["arm"], row["key"]) for row in rows]
    assert len(exposures) == len(set(exposures))
    assert set(exposures) == days.exposed
    assert not [file_name for file_name in store.names("exposures/parts") if file_name.endswith(".json")]


async def test_three_experiments_over_thirty_days(tmp_path: Path, redis_url: str) -> None:
    days = await live_through(a_seed(), tmp_path, redis_url, keys=200, requests=30, nightly=0.5)

    counts = days.counts
    assert min(counts[f"answered by {letter}"] for letter in "abcd") > 0
    assert counts["roll_back"] == counts["freed"] == 1 and counts["retired"] > 20
    assert counts["moved"] > 0 and len(days.exposed) > 300


@pytest.mark.storm
@pytest.mark.parametrize("number", range(STORM_SEEDS))
async def test_three_experiments_over_thirty_days_many_times(tmp_path: Path, redis_url: str, number: int) -> None:
    await live_through(a_seed() + number, tmp_path, redis_url, keys=1_000, requests=400, nightly=0.9)
