"""Interactions whose times are ahead of the clock, as those of a time zone that were written as UTC."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache.process.redis_server import RedisServer
from cache.store.artefacts import read_manifest
from precompute.erasure.erasing import begin_erasing
from precompute.steps.night import Night, run_night
from tests.integration.nights import prepare

AHEAD_S = 3 * 3600


def test_the_night_after_an_erasure_is_not_refused_for_lists_that_cannot_have_changed(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    # given clicks of which the newest are three hours ahead, and a night over all of them
    config = prepare(tmp_path / "n", own_redis.url, users=300, items=60)
    path = tmp_path / "n" / "interactions.parquet"
    table = pq.read_table(path)
    times_us = pc.cast(table["timestamp"], pa.int64())
    shift_us = int((time.time() + AHEAD_S) * 1e6) - pc.max(times_us).as_py()
    shifted_times = pc.cast(pc.add(times_us, shift_us), pa.timestamp("us", tz="UTC"))
    pq.write_table(table.set_column(2, "timestamp", shifted_times), path)
    now = datetime.now(UTC)
    run_night(Night(config, "first", named=(now - timedelta(minutes=1)).isoformat()))

    # when a user is erased, and a night runs without new clicks
    begin_erasing(config.store(), min(table["user"].to_pylist()).encode(), "user", requested_at=1.0)
    lines = run_night(Night(config, "second", named=now.isoformat()))

    # then it is published
    generation = lines[0][1].result_summary.split()[0]
    manifest = read_manifest(config.store(), generation)
    assert {gate["rule"]: gate["passed"] for gate in manifest.gates}["stale_lists"]
    assert any("3.0 h ahead of this host's clock" in remark for remark in manifest.facts["remarks"])
