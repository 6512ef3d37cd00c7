"""kill -9 at random points of every step, a service under traffic beside it: readers see nothing of it, and a
re-run ends exactly where a twin ends that was never disturbed.
"""

import itertools
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer
from infra.local.service import ServiceProcess
from tests.integration.killed_steps import night
from tests.integration.killing import run
from tests.integration.killing_ground import LOSSES, Ground
from tests.integration.nights import DATA_UNTIL, environment, histories, prepare, top_lists
from tests.integration.watching import Watch
from tests.integration.wholeness import moves

USERS, ITEMS = 300, 100
KILLS, AT_LEAST = 210, 4


@pytest.fixture
def ground(tmp_path: Path, own_redis: RedisServer) -> Iterator[Ground]:
    """Two equal namespaces in two Redis databases with one live generation each, and a service over the first."""
    seed = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed} (LARDER_SEED repeats it)")
    config = replace(
        prepare(tmp_path / "night", own_redis.url, seed=seed % 1_000, users=USERS, items=ITEMS),
        page_bytes=4096, load_chunk_bytes=4096, keep=1, superseded_grace_s=0.0,
    )  # fmt: skip
    twin = replace(config, artifacts="twin", state="twin-state", redis_url=own_redis.url.removesuffix("0") + "1")
    for namesake in (config, twin):
        assert run(partial(night, namesake, DATA_UNTIL, "first")) is not None
    users = sorted(histories(config))
    items = sorted({item for history in histories(config).values() for item in history})
    live = moves(config)[0]
    with ExitStack() as stack:
        # L1 holds next to nothing, so that every answer is read from Redis' pages.
        environ = environment(config, LARDER_L1_BYTES="4096", LARDER_POLL_S="0.1", LARDER_HEARTBEAT_S="0.2")
        service = stack.enter_context(ServiceProcess(tmp_path / "service.log", environ))
        watch = Watch(service.url, users, items, seed=seed)
        watch.expected[live] = top_lists(config, live, users)
        stack.enter_context(watch)
        ground = Ground(config, twin, watch, random.Random(seed), users)
        yield ground
        print(f"killed {dict(ground.killed)}, answers {watch.answers}, {dict(watch.sources)}")


def test_a_killed_night_publish_roll_back_and_restore_end_as_if_undisturbed(ground: Ground) -> None:
    ground.publish(ground.make(kills=1), kills=1)
    ground.restore("everything", kills=1)
    ground.roll_back(kills=1)
    ground.whole_night(kills=1)

    assert ground.killed.total() >= 6
    assert not set(ground.watch.sources) - {"l1", "l2", "live", "previous", "default"}


@pytest.mark.storm
def test_two_hundred_kills_leave_no_trace_and_no_reader_notices_one(ground: Ground) -> None:
    for round_number in itertools.count():
        generation = ground.make(kills=2, damaged=round_number % 2 == 0)
        if round_number % 3 == 1:
            ground.try_out(generation, kills=2)
        ground.publish(generation, kills=2)
        ground.restore(LOSSES[round_number % len(LOSSES)], kills=2)
        if round_number % 2:
            ground.roll_back(kills=2)
            ground.try_out(ground.make(kills=0), kills=1)
            ground.abandon(kills=2)
        ground.whole_night(kills=2)
        if ground.killed.total() >= KILLS and min(ground.killed.values()) >= AT_LEAST:
            break

    print(f"{ground.sweep()} unfinished files swept")
    assert set(ground.killed) == {
        "build", "load", "refuse", "verify", "publish", "retire", "restore", "roll_back", "night",
        "canary", "abandon",
    }  # fmt: skip
