"""The walk of a shard: short, and as the documentation shows it."""

from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer
from cache.topk.compiled import find_kernel
from tests.bench.tools.night_walk import table, walk
from tests.integration.nights import prepare

DOCUMENT = Path(__file__).parents[3] / "docs/explanation/life-of-a-night.md"
HOPS_MAX = 25


@pytest.mark.skipif(find_kernel() is None, reason="the walk is drawn with the compiled kernel")
def test_a_shard_is_a_short_walk_and_documented(tmp_path: Path, own_redis: RedisServer) -> None:
    hops = walk(prepare(tmp_path / "night", own_redis.url, users=200, items=60))

    assert len(hops) <= HOPS_MAX
    assert table(hops) in DOCUMENT.read_text()
