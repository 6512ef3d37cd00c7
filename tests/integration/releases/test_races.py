"""Processes that publish, roll back, try out, pin, retire and restore at once, while Redis forgets: no rule breaks."""

import itertools
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from cache.control.control_keys import Control
from cache.control.states import GenerationState, fold_releases
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.releases import MOVE_ACTIONS, all_releases
from precompute.releases import moves
from precompute.releases.recovery import restore_redis
from precompute.releases.release_log import Releases
from precompute.releases.sweep import unneeded_generations
from tests.integration.racing import Racer, follow, race
from tests.integration.release_world import World, pages_of
from tests.polling import poll_until

SEED = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(2**31))
RACERS, READERS = 4, 2
MOVES_MIN = 10
"""Publishes and roll backs after Redis forgot for the last time: nothing stays in the way of the next one."""


def make(releases: Releases, generation: str) -> None:
    """Small files and their manifest."""
    World(releases.store, releases.control.client, releases.control.keyspace).make(generation)


def dumped(client: Any) -> dict[bytes, bytes]:
    """Every key as Redis would save it."""
    dump_by_key = {key: client.dump(key) for key in client.keys("*")}
    return {key: value for key, value in dump_by_key.items() if value is not None}


def take_back(client: Any, saved: dict[bytes, bytes]) -> None:
    """Put Redis back to an earlier state in one step, as a server that loads an older file."""
    with client.pipeline(transaction=True) as pipeline:
        pipeline.flushall()
        for key, value in saved.items():
            pipeline.restore(key, 0, value)
        pipeline.execute()


def moved(folder: Path) -> int:
    """Publishes and roll backs that readers saw; a restore moves nobody on."""
    history = all_releases(ArtefactStore(str(folder)))
    return sum(release.is_done and release.action in ("publish", "roll_back") for release in history)


def sum_racer_counts(racing: Any) -> dict[str, int]:
    """What all racers did, and what they were told."""
    counts: dict[str, int] = {}
    for name, count in itertools.chain.from_iterable(future.result(60).items() for future in racing):
        counts[name] = counts.get(name, 0) + count
    return dict(sorted(counts.items()))


def race_for(seconds: float, url: str, folder: Path, keys: Keyspace, disasters: int) -> tuple[dict[str, int], Any]:
    """Run racers while Redis is emptied or put back at times; return what they did and readers followed.

    Raises AssertionError when the pointer does not move on after the last time, which nobody but racers repair.
    """
    context = multiprocessing.get_context("spawn")
    rng, saved = random.Random(SEED), {}
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(RACERS + READERS, mp_context=context) as pool,
        redis.Redis.from_url(url) as client,
    ):
        stop, ready = manager.Event(), manager.Barrier(RACERS + READERS + 1)
        racing = [
            pool.submit(race, url, folder, keys, racer_number, SEED, stop, make, ready)
            for racer_number in range(RACERS)
        ]
        reading = [pool.submit(follow, url, keys, stop, ready) for _ in range(READERS)]
        try:
            ready.wait(60)
            for number in range(disasters):
                time.sleep(seconds / (disasters + 1) / 2)
                saved = dumped(client)
                time.sleep(seconds / (disasters + 1) / 2)
                take_back(client, {} if (number + rng.randrange(2)) % 2 else saved)
            moves_before = moved(folder)
            time.sleep(seconds / (disasters + 1))
            goes_on = poll_until(lambda: moved(folder) >= moves_before + MOVES_MIN, 30.0)
        finally:
            stop.set()
        assert goes_on, f"the pointer stands still: {sum_racer_counts(racing)}"
        return sum_racer_counts(racing), [future.result(60) for future in reading]


def check(url: str, folder: Path, keys: Keyspace, followed: Any, disasters: int) -> int:
    """Raise AssertionError for a broken rule; return the number of moves."""
    store = ArtefactStore(str(folder))
    for reader_steps in followed:
        epochs = [epoch for _, epoch, _ in reader_steps]
        assert epochs == sorted(set(epochs)), "a reader went backwards"
    with connect(url, 10.0) as client:
        releases = Releases(store, Control(client, keys))
        if disasters:
            restore_redis(releases, attempt="at the end", chunk_bytes=1 << 16)
        view = releases.view()
        view.demand_agreement()
        history, ledger = view.history, view.ledger
        assert list(ledger.state_by_generation.values()).count(GenerationState.LIVE) == 1
        assert view.pointer is not None and view.pointer.generation == ledger.live_generation
        assert view.pointer.previous in (None, ledger.previous_generation)
        assert (
            ledger.previous_generation is None or ledger.state(ledger.previous_generation) is GenerationState.SUPERSEDED
        )
        _check_history(history)
        _check_pages(client, keys, store, view)
        # The next night is not blocked by anything.
        racer = Racer(url, folder, keys, 99, SEED)
        racer.rng.random = lambda: 1.0  # type: ignore[method-assign]
        racer.prepare("20270101T000000Z-" + "d" * 12, make)
        moves.publish(releases, "20270101T000000Z-" + "d" * 12, attempt="the last night")
    return sum(release.action in MOVE_ACTIONS and release.is_done for release in history)


def _check_history(history: Any) -> None:
    completed_releases = [release for release in history if release.is_done]
    verified = [release for release in history if release.action == "verify"]
    attempts = [  # a verification since asks for another publish by the same attempt
        (
            release.action,
            release.attempt,
            sum(
                verification.epoch < release.epoch
                for verification in verified
                if verification.generation == release.generation
            ),
        )
        for release in completed_releases
        if release.action in MOVE_ACTIONS
    ]
    assert len(attempts) == len(set(attempts)), "an attempt moved the pointer twice"
    for number, release in enumerate(history):
        ledger_before = fold_releases(history[:number])
        if not release.is_done or release.action not in MOVE_ACTIONS:
            continue
        state = ledger_before.state(release.generation)
        assert state not in (
            GenerationState.REFUSED,
            GenerationState.RETIRED,
            GenerationState.ABANDONED,
            GenerationState.ROLLED_BACK,
        ), f"{release} made live what is {state}"
        if release.action == "roll_back":
            assert state is GenerationState.SUPERSEDED, f"{release} landed on what is {state}"


def _check_pages(client: Any, keys: Keyspace, store: ArtefactStore, view: Any) -> None:
    page_generations = {key.decode().split(":")[4] for key in client.keys(f"larder:1:{keys.namespace}:g:*")}
    assert page_generations <= set(view.registry_rows), (
        f"pages of {page_generations - set(view.registry_rows)} belong to nobody"
    )
    live = view.ledger.live_generation
    assert store.read(generation_path(live, "manifest.json")) is not None
    assert len(pages_of(World(store, client, keys), live)) == 10
    assert live not in unneeded_generations(Releases(store, Control(client, keys)), kept_generations=0, grace_s=0.0)


def test_racing_processes_break_no_rule(redis_url: str, tmp_path: Path, keyspace: Keyspace) -> None:
    racing, followed = race_for(4.0, redis_url, tmp_path, keyspace, disasters=0)
    check(redis_url, tmp_path, keyspace, followed, 0)
    assert all(action in racing for action in ("_night", "_roll_back", "_retire", "_canary")), racing


def test_racing_processes_break_no_rule_while_redis_forgets(own_redis: Any, tmp_path: Path, keyspace: Keyspace) -> None:
    racing, followed = race_for(6.0, own_redis.url, tmp_path, keyspace, disasters=2)
    check(own_redis.url, tmp_path, keyspace, followed, 2)
    actions = {release.action for release in all_releases(ArtefactStore(str(tmp_path))) if release.is_done}
    assert {"publish", "roll_back", "restore"} <= actions, racing


@pytest.mark.storm
@pytest.mark.parametrize("disasters", [0, 40])
def test_minutes_of_races_break_no_rule(
    own_redis: Any, tmp_path: Path, keyspace: Keyspace, disasters: int, capsys: pytest.CaptureFixture[str]
) -> None:
    racing, followed = race_for(120.0, own_redis.url, tmp_path, keyspace, disasters)
    move_count = check(own_redis.url, tmp_path, keyspace, followed, disasters)
    with capsys.disabled():
        print(f"seed {SEED}: {move_count} moves of the pointer, {disasters} times forgotten, {racing}")
