"""What a replica finds wrong with its store: when it looks, in which order, and what is no problem."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from cache.errors import StoreError, TierUnavailable
from cache.store.artefacts import ArtefactStore
from cache.store.releases import Pointer, Release, done_path, intent_path
from serving.generations import store_watch
from serving.generations.nights import ReleaseWatch
from serving.generations.store_watch import FILES_INTERVAL_S, StoreWatch
from serving.process.resources import StoreThreads
from tests.fakes import THREADS, FakeClock, FakeControl

A = "20260101T000000Z-aaaaaaaaaaaa"


class Redis(FakeControl):
    """Has the pointer of an epoch, or none, or does not answer."""

    epoch: int | None = None
    is_away = False

    async def watch(self) -> tuple[bytes | None, bytes | None]:
        if self.is_away:
            raise TierUnavailable("away", reason="connection")
        return None if self.epoch is None else Pointer(A, self.epoch, None, "a", 0.0).to_bytes(), None


class World:
    """A store with release records, whose generations have the files that a test says."""

    def __init__(self, folder: Path, in_thread: StoreThreads = THREADS) -> None:
        self.store, self.redis, self.clock = ArtefactStore(str(folder / "store")), Redis(), FakeClock()
        self.releases = ReleaseWatch(self.store, in_thread)
        self.watch = StoreWatch(self.store, self.redis, self.releases, in_thread, self.clock)
        self.file_problems: list[str] = []
        self.files_checks = 0

    def record(self, number: int, *, epoch: int | None = None, is_done: bool = True) -> None:
        release = Release(epoch or number, "publish", A, None, "a", 100.0 * number, number=number)
        self.store.write_once(intent_path(number), release.to_bytes())
        if is_done:
            self.store.write_once(done_path(number), b"")

    def find_file_problems(self, _store: ArtefactStore, _history: Sequence[Release]) -> list[str]:
        self.files_checks += 1
        return self.file_problems

    async def look(self, after_s: float = 0.0) -> str | None:
        self.clock.tick(after_s)
        await self.watch.refresh()
        return self.watch.problem


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)
    monkeypatch.setattr(store_watch, "generation_files_problems", world.find_file_problems)
    return world


async def test_a_pointer_of_no_record_is_a_problem_until_the_store_explains_it(world: World) -> None:
    world.record(1)
    world.redis.epoch = 2
    problem = await world.look()
    assert problem is not None and "no release record explains" in problem and "larder restore" in problem

    world.record(2)
    assert await world.look() is None


@pytest.mark.parametrize("epoch", [None, 1, 2])
async def test_a_move_that_is_not_done_and_a_pointer_that_others_report_are_none(world: World, epoch: int) -> None:
    world.record(1)
    world.record(2, is_done=epoch is None)
    world.redis.epoch = epoch

    assert await world.look() is None


async def test_a_release_between_pointer_and_records_is_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.record(1)
    world.redis.epoch = 1
    watch = world.redis.watch

    async def watch_before_a_release() -> tuple[bytes | None, bytes | None]:
        pointer_and_note = await watch()
        world.record(2)
        return pointer_and_note

    monkeypatch.setattr(world.redis, "watch", watch_before_a_release)

    assert await world.look() is None


@pytest.mark.parametrize("looks_between", [False, True])
async def test_a_release_of_the_number_of_one_that_an_older_copy_lacks_explains_the_pointer(
    world: World, looks_between: bool
) -> None:
    # given a store whose two records were read
    world.record(1)
    world.record(2)
    assert await world.look() is None

    # when a copy without the second one is put back, and the next release gets its number and another epoch
    world.store.delete(intent_path(2))
    world.store.delete(done_path(2))
    if looks_between:
        assert await world.look() is None
    world.record(2, epoch=30)
    world.redis.epoch = 30

    # then the pointer is explained, and what was known of the number is forgotten
    assert await world.look() is None
    assert [release.epoch for release in world.releases.read_records()] == [1, 30]


async def test_a_lost_record_is_a_problem(world: World) -> None:
    for epoch in (1, 2):
        world.record(epoch)
    world.store.delete(intent_path(1))

    problem = await world.look()

    assert problem is not None and "releases/1.json in" in problem and "put the file back" in problem


async def test_a_record_damaged_after_it_was_read_is_a_problem_at_the_next_listing(world: World) -> None:
    world.record(1)
    assert await world.look() is None
    world.store.write(intent_path(1), b"no record")
    assert await world.look(FILES_INTERVAL_S - 1) is None

    problem = await world.look(1)

    assert problem is not None and "releases/1.json in" in problem
    assert await world.look(1) == problem  # the known records are still whole


async def test_files_are_listed_every_few_minutes_and_their_problem_stays_in_between(world: World) -> None:
    world.record(1)
    world.file_problems = ["s3://key:secret@shop lacks a file", "previous lacks a file"]
    assert await world.look() == "s3://key:***@shop lacks a file"

    world.file_problems = []
    assert await world.look(FILES_INTERVAL_S - 1) == "s3://key:***@shop lacks a file" and world.files_checks == 1
    assert await world.look(1) is None and world.files_checks == 2


async def test_files_that_a_release_meanwhile_retired_are_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def release_and_find(store: ArtefactStore, history: Sequence[Release]) -> list[str]:
        world.record(2)
        return ["previous lacks a file"]

    world.record(1)
    monkeypatch.setattr(store_watch, "generation_files_problems", release_and_find)

    assert await world.look() is None


async def test_a_full_disk_is_a_problem(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "full_store_problem", lambda _store: "the disk is full")

    assert await world.look() == "the disk is full"


async def test_a_store_or_a_redis_that_does_not_answer_is_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.record(1)
    world.redis.epoch = 2
    problem = await world.look()

    def fail(_path: str) -> list[str]:
        raise StoreError("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "names", fail)
        assert problem is not None and await world.look(FILES_INTERVAL_S) == problem
    world.redis.is_away = True
    assert await world.look() is None


async def test_a_store_that_hangs_takes_one_of_its_threads_and_none_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, gate, hangs, names = StoreThreads(), threading.Event(), threading.Event(), list[str]()

    def hang(_path: str) -> list[str]:
        names.append(threading.current_thread().name)
        hangs.set()
        gate.wait(30)
        return []

    world = World(tmp_path, threads)
    monkeypatch.setattr(world.store, "names", hang)
    looking = asyncio.create_task(world.look())
    try:
        assert await asyncio.to_thread(hangs.wait, 5)
        # nor does it hold what other readers of the records wait for
        assert not world.releases._records_lock.locked()
    finally:
        gate.set()
        await looking
        threads.close()
    assert all(name.startswith("larder-store") for name in names)
