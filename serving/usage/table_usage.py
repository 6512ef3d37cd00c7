"""Usage of the live generation's records: which are read at all, and how often for the memory they take."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cache.errors import TierUnavailable
from cache.format.ids import hash_id
from cache.l2.control_plane import ControlPlane
from cache.usage.hot_keys import EntityName
from serving.generations.snapshot import Snapshot
from serving.metrics.collectors import by_label
from serving.metrics.registry import Metrics, counts_of
from serving.requests.answers import STORED_SOURCES

READ_HASHES_MAX = 1 << 16
"""Hashes kept between two reports; what comes after them is left out and counted."""

HASHES_PER_PFADD = 512
"""Hashes in one PFADD: some 0.2 ms of Redis, which readers wait for."""

READ_COUNTS_LIFE_S = 3 * 86_400
"""Seconds that the counts live, from the last report on."""

HashBatches = Sequence[Sequence[int | bytes]]
"""Hashes as they were added."""


GIGABYTE = 1e9


class ReadHashes:
    """Hashes of entities that were read, by generation and table; Redis' HyperLogLogs count them over all replicas.

    Who is read has been read from Redis once per process and generation (or ahead of requests, which the sketch of
    recent requests tells), so hits of L1 add nothing and cost nothing.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._keys: defaultdict[tuple[str, str], list[Sequence[int | bytes]]] = defaultdict(list)
        self._room = READ_HASHES_MAX

    def add(self, generation: str, table: str, keys: Sequence[int | bytes]) -> None:
        """Adds the hashes of entities that were read; counts them as left out if there is no room."""
        if len(keys) > self._room:
            self.left_out += len(keys)
            return
        self._room -= len(keys)
        self._keys[generation, table].append(keys)

    def drain(self, generation: str) -> Mapping[str, HashBatches]:
        """Hashes by table of what was read of this generation since the last call; those of others are forgotten."""
        keys_by_table = {
            table: keys for (of, table), keys in self._keys.items() if of == generation
        }
        self._keys.clear()
        self._room = READ_HASHES_MAX
        return keys_by_table


def pack_hashes(added: HashBatches) -> list[bytes]:
    """Hashes as bytes, each once; digests of inputs left out. 20 ms for all that is kept: not for the event loop."""
    keys = set(chain.from_iterable(added))
    return [
        entity_hash.to_bytes(8, "little") for entity_hash in keys if isinstance(entity_hash, int)
    ]


def split_hashes(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Batches of the hashes that travel at once."""
    return [keys[at : at + HASHES_PER_PFADD] for at in range(0, len(keys), HASHES_PER_PFADD)]


@dataclass(eq=False)
class TableUsage(Collector):
    """Reads of all replicas, as Redis adds them up; hits of this process since the live release came."""

    control: ControlPlane
    reads: ReadHashes
    metrics: Metrics
    recent: Callable[[], Iterable[EntityName]]
    live: Callable[[], Snapshot | None]
    failed: int = field(init=False, default=0)
    read: dict[str, int] = field(init=False, default_factory=dict)
    _reported_names: set[tuple[str, EntityName]] = field(init=False, default_factory=set)
    _release: tuple[str, int] | None = field(init=False, default=None)
    _hits_before: dict[str, float] = field(init=False, default_factory=dict)

    async def report(self) -> None:
        """Report this replica's reads to Redis, and read the total over all replicas."""
        live = self.live()
        if live is None:
            return
        if (release := (live.generation, live.epoch)) != self._release:
            if self._release is not None:
                self._hits_before = hits_of(self.metrics)
            self._release, self.read = release, {}
        # Taken here: what is remembered of requests is the event loop's own, and changes with each of them.
        recent, reads = list(self.recent()), self.reads.drain(live.generation)
        keys_by_table = await asyncio.to_thread(self._packed, live, recent, reads)
        send_command, name = self.control.execute, self.control.keyspace.read
        try:
            for table, keys in keys_by_table.items():
                for piece in split_hashes(keys):
                    await send_command("PFADD", name(live.generation, table), *piece)
                await send_command("EXPIRE", name(live.generation, table), READ_COUNTS_LIFE_S)
            for table in live.manifest.tables:
                # An estimate: off by 0.8 % in the standard deviation, so it may exceed what there is.
                count = int(await send_command("PFCOUNT", name(live.generation, table)))
                self.read[table] = min(count, records(live, table))
        except TierUnavailable:
            self.failed += 1

    def _packed(
        self, live: Snapshot, recent: Sequence[EntityName], reads: Mapping[str, HashBatches]
    ) -> dict[str, list[bytes]]:
        """Pack hashes of read entities, and of those requested without a read, as they were warmed before."""
        keys_by_table = {table: pack_hashes(keys) for table, keys in reads.items()}
        named = {(live.generation, entity_name) for entity_name in recent}
        for _, (name, raw) in named - self._reported_names:
            table = live.manifest.tables.get(name)
            if table is not None:
                key = hash_id(raw, live.directories[table.entity].seed)
                keys_by_table.setdefault(name, []).append(key.to_bytes(8, "little"))
        self._reported_names = named
        return keys_by_table

    def hits(self) -> dict[str, float]:
        """Hits of this process under the live release, by table."""
        return {
            table: count - self._hits_before.get(table, 0.0)
            for table, count in hits_of(self.metrics).items()
        }

    def read_share(self) -> float | None:
        """Share of the live generation's records that were read at least once; None when that is not known."""
        live = self.live()
        if live is None or not self.read or self._release != (live.generation, live.epoch):
            return None
        return sum(self.read.values()) / max(1, sum(records(live, table) for table in self.read))

    def size_bytes(self) -> int:
        """Bytes of the live generation's pages."""
        live = self.live()
        return 0 if live is None else sum(size_of(live, table) for table in live.manifest.tables)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Gauge families by table of the live generation; every family, also before there is one."""
        live = self.live()
        live_tables = [] if live is None else [(live, table) for table in live.manifest.tables]
        hits = self.hits()
        values: Mapping[str, tuple[str, Mapping[str, float]]] = {
            "records": ("Records of the live generation", {t: records(of, t) for of, t in live_tables}),
            "bytes": ("Bytes of its pages", {t: size_of(of, t) for of, t in live_tables}),
            "read_records": ("Of its records, those read at least once by any replica", self.read),
            "hits": ("Answers from stored records since it is live", {t: hits.get(t, 0) for _, t in live_tables}),
        }  # fmt: skip
        for name, (text, by_table) in values.items():
            family = GaugeMetricFamily(f"larder_table_{name}", text, labels=["table"])
            yield by_label(family, by_table)


def hits_of(metrics: Metrics) -> dict[str, float]:
    """Answers from stored records by table, since the start of this process."""
    metrics.settle()
    hits_by_table: defaultdict[str, float] = defaultdict(float)
    for labels, count in counts_of(metrics.answers):
        if labels["source"] in STORED_SOURCES:
            hits_by_table[labels["table"]] += count
    return dict(hits_by_table)


def records(live: Snapshot, table: str) -> int:
    """Number of records of a table."""
    return sum(part.count for part in live.manifest.tables[table].parts)


def size_of(live: Snapshot, table: str) -> int:
    """Bytes of a table's pages."""
    return sum(part.file.size_bytes for part in live.manifest.tables[table].parts)
