"""Which records are read at all: what is told of it, and by which thread it is gathered."""

import threading
from collections.abc import Sequence
from typing import Any

from cache.format.ids import hash_id
from cache.usage.hot_keys import EntityName
from serving.usage.table_usage import ReadHashes, TableUsage
from tests.fakes import FakeControl
from tests.unit.serving.world import World


class FakeRedis(FakeControl):
    """Counts nothing, keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[bytes] = []

    async def execute(self, *command: str | bytes | float) -> Any:
        if command[0] == "PFADD":
            self.told += [packed_hash for packed_hash in command[2:] if isinstance(packed_hash, bytes)]
        return 0


async def test_what_is_remembered_of_requests_is_looked_at_by_the_event_loop_alone() -> None:
    world, redis, reads = World(), FakeRedis(), ReadHashes()
    live = world.snapshot()
    seed = live.directories["user"].seed
    loop = threading.get_ident()
    reader_threads: list[int] = []

    class Watched(list[EntityName]):
        def __iter__(self) -> Any:
            reader_threads.append(threading.get_ident())
            return super().__iter__()

    remembered = Watched([("user_topk", b"u1"), ("no_such_table", b"u2")])

    def recent() -> Sequence[EntityName]:
        reader_threads.append(threading.get_ident())
        return remembered

    usage = TableUsage(redis, reads, world.metrics, recent, lambda: live)
    reads.add(live.generation, "user_topk", (hash_id(b"u3", seed),))

    await usage.report()

    # Only the loop's thread may read: another thread would iterate a deque while requests append to it.
    assert reader_threads and set(reader_threads) == {loop}
    assert sorted(redis.told) == sorted(hash_id(raw_id, seed).to_bytes(8, "little") for raw_id in (b"u1", b"u3"))
