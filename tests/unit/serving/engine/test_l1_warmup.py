"""Reading ahead: before the first answer from what all replicas were asked, before a flip from one's own too."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from cache.format.ids import fingerprint
from cache.store.blocklist import Blocklist
from cache.tiers.reads import Hit, ReadResult, RecordKey, SnapshotView
from cache.tiers.tiered import TieredCache
from cache.usage.hot_keys import EntityName
from serving.engine.l1_warmup import L1Warmup
from tests.fakes import FakeClock
from tests.unit.serving.world import OLDER, USERS, World

NAMES = {fingerprint(user_id.encode()): user_id.encode() for user_id in USERS}


def user(number: int) -> EntityName:
    return "user_topk", USERS[number].encode()


@dataclass
class FakeReads:
    """Finds everything, each slice in `takes_s`."""

    timer: FakeClock
    takes_s: float = 0.0
    read: list[tuple[str, int]] = field(default_factory=list)

    async def get_many(
        self, view: SnapshotView, record_keys: Sequence[RecordKey], deadline: float, *, is_counted: bool
    ) -> Sequence[ReadResult]:
        assert not is_counted
        self.timer.tick(self.takes_s)
        self.read += [(view.generation, record_key.fingerprint) for record_key in record_keys]
        return [Hit(b"", "l2", False, None)] * len(record_keys)


@dataclass
class Bench:
    """A replica's reading ahead, with what it and others were asked."""

    timer: FakeClock = field(default_factory=FakeClock)
    recent: list[EntityName] = field(default_factory=list)
    shared: list[EntityName] = field(default_factory=list)
    hottest_call_count: int = 0
    observed: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = World()
        self.coming, self.old = world.snapshot(), world.snapshot(OLDER)
        self.reads = FakeReads(self.timer)
        self.warming = L1Warmup(
            cast(TieredCache, self.reads),
            lambda: self.recent,
            self.hottest,
            lambda records, seconds: self.observed.append((records, seconds)),
            self.timer,
        )

    async def hottest(self) -> Sequence[EntityName]:
        self.hottest_call_count += 1
        return self.shared

    @property
    def users(self) -> list[bytes]:
        """Who was read, in order."""
        return [NAMES[record_fingerprint] for _, record_fingerprint in self.reads.read]


async def test_a_cold_start_reads_what_others_were_asked_hottest_first() -> None:
    bench = Bench(shared=[user(3), user(1)])

    await bench.warming(bench.coming, None)

    assert bench.users == [b"u3", b"u1"]
    assert bench.observed == [(2, 0.0)]


async def test_a_flip_reads_its_own_first_then_the_others_once() -> None:
    bench = Bench(recent=[user(5), user(3)], shared=[user(3), user(1)])

    await bench.warming(bench.coming, bench.old)

    assert bench.users == [b"u5", b"u3", b"u1"]


async def test_topping_up_reads_only_what_is_new_and_does_not_ask_again() -> None:
    bench = Bench(recent=[user(5)], shared=[user(1)])
    await bench.warming(bench.coming, bench.old)
    bench.recent.append(user(6))

    await bench.warming(bench.coming, bench.old)

    assert bench.users == [b"u5", b"u1", b"u6"] and bench.hottest_call_count == 1


async def test_another_generation_starts_over() -> None:
    bench = Bench(shared=[user(1)])
    await bench.warming(bench.old, None)

    await bench.warming(bench.coming, bench.old)

    assert [generation for generation, _ in bench.reads.read] == [bench.old.generation, bench.coming.generation]
    assert bench.hottest_call_count == 2


async def test_nothing_is_read_for_what_is_live_already() -> None:
    bench = Bench(recent=[user(1)], shared=[user(2)])

    await bench.warming(bench.coming, bench.coming)

    assert bench.users == [] and bench.hottest_call_count == 0 and bench.observed == []


async def test_what_is_blocked_unknown_or_of_no_table_is_not_read() -> None:
    names = [user(1), ("user_topk", b"stranger"), ("gone", b"u2"), ("", b""), user(2)]
    bench = Bench(shared=names)

    blocklist = Blocklist(1, users=frozenset({b"u1"}))
    await bench.warming(replace(bench.coming, blocklist=blocklist), None)

    assert bench.users == [b"u2"]


async def test_time_is_bounded_and_the_rest_is_read_at_the_next_top_up() -> None:
    names = [("user_vector" if number % 2 else "user_topk", USERS[number // 2].encode()) for number in range(24)]
    bench = Bench(shared=names)
    bench.reads.takes_s = 6.0

    await bench.warming(bench.coming, None)
    assert len(bench.reads.read) == 16
    await bench.warming(bench.coming, bench.old)

    assert len(bench.reads.read) == 24 and bench.hottest_call_count == 1


async def test_without_a_sketch_only_its_own_are_read() -> None:
    bench = Bench(recent=[user(4)])
    warming = L1Warmup(cast(TieredCache, bench.reads), lambda: bench.recent)

    await warming(bench.coming, None)

    assert bench.users == [b"u4"]
