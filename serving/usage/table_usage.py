"""Usage of the live generation's records: share of records read, and reads relative to memory."""

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
from serving.metrics.collectors import add_samples_by_label
from serving.metrics.registry import Metrics, counts_of
from serving.requests.answers import STORED_SOURCES

READ_HASHES_MAX = 1 << 16
"""Largest number of hashes kept between two reports; further ones are dropped and counted."""

HASHES_PER_PFADD = 512
"""Hashes in one PFADD, which blocks Redis for about 0.2 ms."""

READ_COUNTS_TTL_S = 3 * 86_400
"""Seconds that the counts live after the last report."""

HashBatches = Sequence[Sequence[int | bytes]]
"""Batches of hashes as they were added."""


GIGABYTE = 1e9


class ReadHashes:
    """Hashes of entities that were read, by generation and table; HyperLogLogs in Redis count them over all replicas.

    Each entity in L1 was read from Redis once per process and generation (or was warmed up, which the recent requests
    show), so hits of L1 need not be recorded.
    """

    def __init__(self) -> None:
        self.left_out_hash_count = 0
        self._hashes_by_table: defaultdict[tuple[str, str], list[Sequence[int | bytes]]] = defaultdict(list)
        self._remaining_hashes = READ_HASHES_MAX

    def add(self, generation: str, table_name: str, entity_hashes: Sequence[int | bytes]) -> None:
        """Add the hashes of entities that were read; count them as dropped if there is no room."""
        if len(entity_hashes) > self._remaining_hashes:
            self.left_out_hash_count += len(entity_hashes)
            return
        self._remaining_hashes -= len(entity_hashes)
        self._hashes_by_table[generation, table_name].append(entity_hashes)

    def drain(self, generation: str) -> Mapping[str, HashBatches]:
        """Return the hashes by table read from this generation since the last call; drop those of other generations."""
        hashes_by_table = {
            table: hash_batches
            for (hashes_generation, table), hash_batches in self._hashes_by_table.items()
            if hashes_generation == generation
        }
        self._hashes_by_table.clear()
        self._remaining_hashes = READ_HASHES_MAX
        return hashes_by_table


def pack_hashes(hash_batches: HashBatches) -> list[bytes]:
    """Return the distinct hashes as bytes, without input digests. Takes up to 20 ms: not for the event loop."""
    entity_hashes = set(chain.from_iterable(hash_batches))
    return [entity_hash.to_bytes(8, "little") for entity_hash in entity_hashes if isinstance(entity_hash, int)]


def split_hashes(packed_hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Yield batches of hashes for one PFADD each."""
    return [
        packed_hashes[first_index : first_index + HASHES_PER_PFADD]
        for first_index in range(0, len(packed_hashes), HASHES_PER_PFADD)
    ]


@dataclass(eq=False)
class TableUsage(Collector):
    """Reads of all replicas, added up in Redis, and hits of this process since the live release."""

    control: ControlPlane
    reads: ReadHashes
    metrics: Metrics
    list_recent_names: Callable[[], Iterable[EntityName]]
    get_live_snapshot: Callable[[], Snapshot | None]
    failed_report_count: int = field(init=False, default=0)
    read_count_by_table: dict[str, int] = field(init=False, default_factory=dict)
    _reported_names: set[tuple[str, EntityName]] = field(init=False, default_factory=set)
    _generation_and_epoch: tuple[str, int] | None = field(init=False, default=None)
    _hits_before_release: dict[str, float] = field(init=False, default_factory=dict)

    async def report(self) -> None:
        """Report this replica's reads to Redis, and read the totals of all replicas."""
        live_snapshot = self.get_live_snapshot()
        if live_snapshot is None:
            return
        if (release := (live_snapshot.generation, live_snapshot.epoch)) != self._generation_and_epoch:
            if self._generation_and_epoch is not None:
                self._hits_before_release = stored_answers_by_table(self.metrics)
            self._generation_and_epoch, self.read_count_by_table = release, {}
        # Taken on the event loop, which changes the remembered requests.
        recent_names, hashes_by_table = (list(self.list_recent_names()), self.reads.drain(live_snapshot.generation))
        packed_hashes_by_table = await asyncio.to_thread(
            self._pack_by_table, live_snapshot, recent_names, hashes_by_table
        )
        send_command, read_key_of = self.control.execute, self.control.keyspace.read_entities
        try:
            for table, packed_hashes in packed_hashes_by_table.items():
                for hash_batch in split_hashes(packed_hashes):
                    await send_command("PFADD", read_key_of(live_snapshot.generation, table), *hash_batch)
                await send_command("EXPIRE", read_key_of(live_snapshot.generation, table), READ_COUNTS_TTL_S)
            for table in live_snapshot.manifest.tables:
                # HyperLogLog's standard error is 0.8 %, so the estimate may exceed the number of records.
                read_count = int(await send_command("PFCOUNT", read_key_of(live_snapshot.generation, table)))
                self.read_count_by_table[table] = min(read_count, table_record_count(live_snapshot, table))
        except TierUnavailable:
            self.failed_report_count += 1

    def _pack_by_table(
        self, live: Snapshot, recent_names: Sequence[EntityName], hashes_by_table: Mapping[str, HashBatches]
    ) -> dict[str, list[bytes]]:
        """Pack hashes of read entities, and of requested entities that were not read because they were warmed up."""
        packed_hashes_by_table = {table: pack_hashes(hash_batches) for table, hash_batches in hashes_by_table.items()}
        names_of_generation = {(live.generation, entity_name) for entity_name in recent_names}
        for _, (table_name, entity_id) in names_of_generation - self._reported_names:
            table = live.manifest.tables.get(table_name)
            if table is not None:
                entity_hash = hash_id(entity_id, live.directories[table.entity].seed)
                packed_hashes_by_table.setdefault(table_name, []).append(entity_hash.to_bytes(8, "little"))
        self._reported_names = names_of_generation
        return packed_hashes_by_table

    def hits_by_table(self) -> dict[str, float]:
        """Return the hits of this process since the live release, by table."""
        return {
            table: count - self._hits_before_release.get(table, 0.0)
            for table, count in stored_answers_by_table(self.metrics).items()
        }

    def read_share(self) -> float | None:
        """Return the share of the live generation's records that were read at least once; None if unknown."""
        live = self.get_live_snapshot()
        if live is None or not self.read_count_by_table or self._generation_and_epoch != (live.generation, live.epoch):
            return None
        return sum(self.read_count_by_table.values()) / max(
            1, sum(table_record_count(live, table) for table in self.read_count_by_table)
        )

    def pages_size_bytes(self) -> int:
        """Bytes of the live generation's pages."""
        live = self.get_live_snapshot()
        return 0 if live is None else sum(table_page_bytes(live, table) for table in live.manifest.tables)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the gauge families by table of the live generation; all families, even without a generation."""
        live = self.get_live_snapshot()
        live_tables = [] if live is None else [(live, table) for table in live.manifest.tables]
        hits = self.hits_by_table()
        text_and_numbers_by_gauge: Mapping[str, tuple[str, Mapping[str, float]]] = {
            (
                    "records"
): ((
                    "Records of the live generation"
), {table: table_record_count(snapshot, table) for snapshot, table in live_tables}),
            "bytes": (
                "Bytes of its pages", {table: table_page_bytes(snapshot, table) for snapshot, table in live_tables},
            ),
            "read_records": (
                "Its records that any replica read at least once",
                self.read_count_by_table),
            (
                    "hits"
): ((
                    "Answers from stored records since the live generation became live"
), {table: hits.get(table, 0) for _, table in live_tables}),
        }  # fmt: skip
        for gauge_name, (help_text, number_by_table) in text_and_numbers_by_gauge.items():
            family = GaugeMetricFamily(f"larder_table_{gauge_name}", help_text, labels=["table"])
            yield add_samples_by_label(family, number_by_table)


def stored_answers_by_table(metrics: Metrics) -> dict[str, float]:
    """Return answers from stored records by table, since the start of this process."""
    metrics.settle()
    hits_by_table: defaultdict[str, float] = defaultdict(float)
    for value_by_label, count in counts_of(metrics.answers):
        if value_by_label["source"] in STORED_SOURCES:
            hits_by_table[value_by_label["table"]] += count
    return dict(hits_by_table)


def table_record_count(live: Snapshot, table_name: str) -> int:
    """Number of records of a table."""
    return sum(table_part.count for table_part in live.manifest.tables[table_name].parts)


def table_page_bytes(live: Snapshot, table_name: str) -> int:
    """Bytes of a table's pages."""
    return sum(table_part.file.size_bytes for table_part in live.manifest.tables[table_name].parts)
