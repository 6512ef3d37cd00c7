"""Every connection of redis-py that Larder opens refuses an absurd count; a reader's pipeline does too."""

import asyncio
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.commands import OverlayRead, PageRead, PageReads
from cache.l2.sync_clients import clone_client, open_client
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.process.redis_server import _fetch_process_id
from precompute.releases.replication import UNREACHABLE, _fetch_run_id
from serving.events.connection import EventsRedis, EventsUnavailable
from serving.events.follower import EventFollower
from tests.forged_redis import ABSURD, forged_redis

ABSURD_LIST = b"*100000000\r\n"
QUICK: dict[str, Any] = {"protocol": 2, "socket_timeout": 5.0}
MEMORY_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Fails a test in which more than some MiB were allocated: hiredis takes 800 MB for such a reply."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY_BYTES


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with forged_redis(ABSURD_LIST, is_split=request.param) as port:
        yield port


@pytest.mark.parametrize(
    "opened",
    [
        lambda port: open_client(f"redis://127.0.0.1:{port}", **QUICK),
        lambda port: clone_client(open_client(f"redis://127.0.0.1:{port}", **QUICK), socket_timeout=4.0),
    ],
    ids=["client", "another"],
)
def test_a_client_of_one_server_is_bounded(port: int, opened: Callable[[int], Any]) -> None:
    with pytest.raises(redis.InvalidResponse, match="announces more than"):
        opened(port).hgetall("registry")


def test_a_client_of_a_cluster_is_bounded_by_its_slot_map(port: int) -> None:
    with pytest.raises(redis.exceptions.RedisClusterException) as raised:
        open_client(f"redis+cluster://127.0.0.1:{port}", **QUICK)
    assert "announces more than" in str(raised.value.__cause__ or raised.value)


def test_a_client_behind_sentinels_is_bounded_by_their_answers(port: int) -> None:
    with pytest.raises(redis.InvalidResponse, match="announces more than"):
        open_client(f"redis+sentinel://127.0.0.1:{port}/main", **QUICK).ping()


def test_what_asks_for_a_run_id_or_a_process_is_bounded(port: int) -> None:
    client = open_client(f"redis://127.0.0.1:{port}", **QUICK)

    assert _fetch_run_id(client, "127.0.0.1", port) == UNREACHABLE
    assert _fetch_process_id(f"redis://127.0.0.1:{port}") is None


async def test_the_control_plane_is_bounded(port: int) -> None:
    for url in (f"redis://127.0.0.1:{port}", f"redis+sentinel://127.0.0.1:{port}/main"):
        tier = RemoteTier(RemoteConfig(url), Keyspace("test"))
        with pytest.raises(TierUnavailable, match="announces more than"):
            await tier.control.watch()
        with pytest.raises(TierUnavailable, match="announces more than"):
            await tier.control.execute_all([("HGETALL", "a"), ("TIME",)])
        await tier.aclose()


async def test_the_redis_of_events_is_bounded(port: int) -> None:
    events = EventsRedis(f"redis://127.0.0.1:{port}", "any")
    with pytest.raises(EventsUnavailable, match="announces more than"):
        await events.execute("XLEN", "events")
    await events.aclose()


async def test_the_follower_of_events_is_bounded(port: int) -> None:
    follower: Any = EventFollower.__new__(EventFollower)
    follower._redis_url, follower._monotonic_clock = f"redis://127.0.0.1:{port}", time.monotonic
    with pytest.raises(redis.InvalidResponse, match="announces more than"):
        async with follower.connect():
            pass


READS = {
    "page": (PageRead("g", "t", 0, 0, 8),),
    "pages": PageReads("g", "t", [0, 1], [0, 8], 8),
    "overlay": (OverlayRead("g", "t", "ab"),),
}


@pytest.mark.parametrize("forged", ABSURD[:-1])  # the last one has an answer before it
@pytest.mark.parametrize("reads", READS.values(), ids=READS)
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
async def test_a_forged_reply_to_a_read_is_a_miss_and_costs_the_connection(
    forged: bytes, reads: Any, is_split: bool
) -> None:
    with forged_redis(forged, is_split=is_split) as port:
        url = f"redis://127.0.0.1:{port}"
        tier = RemoteTier(RemoteConfig(url, deadline_s=5.0), Keyspace("test"))
        async with asyncio.timeout(4.0):  # refused at once, not by its deadline
            answers = await tier.submit(reads, list)

        assert all(isinstance(answer, TierUnavailable) for answer in answers)
        assert tier.pool._connections == []
        await tier.aclose()
