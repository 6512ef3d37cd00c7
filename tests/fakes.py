"""Fakes with the protocols of the code under test, and a small night to read from."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from cache.errors import TierUnavailable
from cache.format.directory import Directory
from cache.format.ids import canonical_id, fingerprint, hash_id, hash_ids
from cache.format.manifest import Artefact, Producer, Table, TablePart
from cache.format.redis_keys import Keyspace
from cache.l2.commands import (
    LEASE_DONE_LIFE_MS,
    LEASE_DONE_PREFIX,
    Command,
    L2Result,
    Lease,
    LeaseTake,
    Overlay,
    OverlayRead,
    OverlayWrite,
    PageRead,
    Read,
)
from cache.l2.control_plane import CommandArgument, ControlPlane
from cache.l2.data_plane import DataPlaneStats
from cache.records import FLAG_LIVE, Layout, encode_numbers
from cache.tiers.l1 import Entry, LocalKey, LocalTier
from cache.tiers.reads import RecordKey, SnapshotView
from serving.process.resources import StoreThreads

T = TypeVar("T")
NO_FILE = Artefact("none", 0, "")
GENERATION = "20261120T000000Z-000000000001"
NEXT_GENERATION = "20261121T000000Z-000000000002"

THREADS = cast(StoreThreads, asyncio.to_thread)
"""Threads of asyncio in place of the pool for the store: nothing has to be closed."""


@dataclass
class FakeClock:
    """A clock that only `tick` moves."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def tick(self, seconds: float) -> None:
        """Advance the clock."""
        self.now_s += seconds


class FakeControl(ControlPlane):
    """A control plane without answers: a test replaces the method that it needs."""

    keyspace = Keyspace("default")

    async def execute(self, *command: CommandArgument) -> Any:
        raise AssertionError(f"nobody was to ask {command[0]!r}")

    async def execute_all(self, commands: Sequence[tuple[CommandArgument, ...]]) -> list[Any]:
        return [await self.execute(*command) for command in commands]

    async def execute_on_servers(self, *command: CommandArgument) -> list[Any]:
        return [await self.execute(*command)]

    async def subscribe(self, channel: str | None = None) -> AsyncGenerator[bytes, None]:
        """Subscribe; no message ever arrives."""
        await asyncio.Event().wait()
        yield b""


@dataclass
class FakeRemote:
    """L2 in a dictionary; `gate`, if set, blocks every call until it opens."""

    timer: Callable[[], float] = field(default_factory=FakeClock)
    fails_with: TierUnavailable | None = None
    gate: asyncio.Event | None = None
    left_at_most_s: float = float("inf")
    pages: dict[tuple[str, str, int], bytes] = field(default_factory=dict)
    overlays: dict[tuple[str, str, str], tuple[bytes, float]] = field(default_factory=dict)
    calls: list[tuple[Read, ...]] = field(default_factory=list)
    writes: list[OverlayWrite] = field(default_factory=list)
    leases: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    lease_commands: list[Lease] = field(default_factory=list)
    lease_s: Callable[[], float] = lambda: 0.0
    control: ControlPlane = field(default_factory=FakeControl)
    stats: DataPlaneStats = field(default_factory=DataPlaneStats)

    async def _read(self, commands: Sequence[Command]) -> list[L2Result]:
        """Read as Redis would: a wrong length is not a record, and a blocked read sees the state before the block."""
        self.calls.append(tuple(command for command in commands if isinstance(command, Read)))
        answers = [self._answer(command) for command in commands]
        if self.gate is not None:
            await self.gate.wait()
        return [self.fails_with or answer for answer in answers]

    def submit(self, commands: Sequence[Command], keep: Callable[[Sequence[L2Result]], T]) -> asyncio.Future[T]:
        """Return a future of what `keep` makes of the stored value."""

        async def read_and_keep() -> T:
            return keep(await self._read(commands))

        return asyncio.ensure_future(read_and_keep())

    def _answer(self, read: Command) -> L2Result:
        if isinstance(read, Lease):
            return self._answer_lease(read)
        assert isinstance(read, Read), read
        if isinstance(read, OverlayRead):
            payload, expires_at = self.overlays.get((read.generation, read.table, read.hash_hex), (b"", 0.0))
            left_s = expires_at - self.timer()
            return Overlay(payload, min(left_s, self.left_at_most_s)) if left_s > 0 else None
        page = self.pages.get((read.generation, read.table, read.page_number), b"")
        page_slice = page[read.page_offset : read.page_offset + read.length_bytes]
        return page_slice if len(page_slice) == read.length_bytes else None

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Store all overlays, or fail all."""
        if self.gate is not None:
            await self.gate.wait()
        if self.fails_with is None:
            self.writes += writes
            for write in writes:
                expires_at = self.timer() + write.overlay_ttl_s
                self.overlays[write.generation, write.table, write.hash_hex] = (write.overlay_value, expires_at)
                if write.lease_mark is not None:
                    done_value = LEASE_DONE_PREFIX + write.lease_mark.holder_token
                    self.leases[write.lease_mark.lease_key] = (done_value, self.timer() + LEASE_DONE_LIFE_MS / 1000)
        return [self.fails_with] * len(writes)

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """Answer at once, as `SET NX GET PX` and the compare-and-set would, within `lease_s` of the fake clock."""
        completed_future: asyncio.Future[bytes | TierUnavailable | None] = asyncio.get_running_loop().create_future()
        completed_future.set_result(self._answer_lease(command))
        return completed_future

    def _answer_lease(self, command: Lease) -> bytes | TierUnavailable | None:
        self.lease_commands.append(command)
        if isinstance(self.timer, FakeClock):
            self.timer.tick(self.lease_s())
        return self.fails_with or self._leased(command)

    def _leased(self, command: Lease) -> bytes | None:
        lease_value, expires_at = self.leases.get(command.lease_key, (b"", 0.0))
        unexpired_value = lease_value if expires_at > self.timer() else None
        ends_at = self.timer() + command.lease_life_ms / 1000
        if isinstance(command, LeaseTake):
            if unexpired_value is None:
                self.leases[command.lease_key] = command.holder_token, ends_at
            return unexpired_value
        if unexpired_value != command.expected_lease_value:
            return None
        self.leases[command.lease_key] = command.new_lease_value, ends_at
        return command.new_lease_value

    async def page(self, read: PageRead) -> bytes | None:
        """Return a page or a part of it."""
        page_bytes = self._answer(read)
        assert not isinstance(page_bytes, Overlay | TierUnavailable)
        return page_bytes

    def bound_s(self) -> float:
        """Return no bound: `gate` may block a read for ever."""
        return float("inf")

    def p99_ms(self, within_s: float = 5.0) -> float | None:
        """Return nothing, since nothing is measured."""
        return None

    async def connect_ahead(self) -> None:
        """Do nothing: there is no connection to open."""

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""

    @property
    def reads(self) -> list[PageRead | OverlayRead]:
        """All reads of all calls."""
        return [read for call in self.calls for read in call]


class Night:
    """A vector table of `count` users, "user-0" and on, as a reader sees a loaded generation."""

    def __init__(self, count: int = 40, *, dims: int = 4, records_per_page: int = 8, table: str = "vectors") -> None:
        self.ids = [f"user-{number}" for number in range(count)]
        self.seed = 7
        raws = [canonical_id(user_id) for user_id in self.ids]
        hashes = hash_ids(raws, self.seed)
        order = np.argsort(hashes)
        prints = np.array([fingerprint(raws[index]) for index in order], np.uint64)
        vectors = np.arange(count * dims, dtype=np.float32).reshape(count, dims)[order] + 1
        self.layout = Layout("vector", dims, "f4")
        rows = encode_numbers(self.layout, prints, vectors, 1_700_000_000).tobytes()
        page_bytes = records_per_page * self.layout.size_bytes
        self.pages = [rows[at : at + page_bytes] for at in range(0, len(rows), page_bytes)]
        part = TablePart(0, len(self.pages), count, NO_FILE, NO_FILE)
        self.table = Table(table, "user", Producer("tower", "user_tower"), self.layout, records_per_page, (part,), ())
        self.directory = Directory(self.seed, [0], [hashes[order]])

    def view(self, generation: str = GENERATION) -> SnapshotView:
        """Return a snapshot's view of the night."""
        return SnapshotView(generation, {"user": self.directory})

    def record_key(self, id_: str, digest: bytes | None = None) -> RecordKey:
        """Return the key of the record of `id_`."""
        raw = canonical_id(id_)
        key = hash_id(raw, self.seed)
        return RecordKey(self.table, key, fingerprint(raw), self.directory.find_position(key), digest)

    def live_record(self, id_: str, value: float = 0.5) -> bytes:
        """Return the record that the live path would compute for `id_`."""
        prints = np.array([fingerprint(canonical_id(id_))], np.uint64)
        vectors = np.full((1, self.layout.width), value, np.float32)
        return encode_numbers(self.layout, prints, vectors, 1_700_000_100, flags=FLAG_LIVE).tobytes()

    def load(self, remote: FakeRemote, generation: str = GENERATION) -> None:
        """Put the night's pages into `remote`."""
        for number, page in enumerate(self.pages):
            remote.pages[generation, self.table.name, number] = page


DIGEST_A = bytes(range(16))
DIGEST_B = bytes(range(16, 32))


def room_for(count: int, record_bytes: int) -> int:
    """Return the L1 bytes that so many records of that size occupy."""
    local = LocalTier(1 << 30)
    for number in range(count):
        local.put(LocalKey("g", "t", number), Entry(bytes(record_bytes), number))
    return local.size_bytes
