"""Loading a table of 616-byte records into Redis: the night's loader beside one command per entity.

Baselines, through redis-py with hiredis: pipelines of 1,000 `SET` with prebuilt keys and values, and `MSET` of 1,000.
The candidate is `precompute.bulk.load.load_part`, from the page file to its mark, with the night's own page and chunk
sizes. Each run starts with an empty Redis; emptying it is not timed. `bytes_over_payload` is what the memory of a
fresh Redis grows by, keys included, over the records' own bytes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import redis

from cache.format.manifest import Artefact, ItemFiles, Manifest, Producer, Table, TablePart
from cache.format.redis_keys import Keyspace
from cache.process.redis_server import RedisServer
from cache.records import Layout
from precompute.builds.tables import records_per_page
from precompute.bulk.load import Part, load_part
from precompute.config.settings import NightConfig
from tests.bench.tools.harness import Promise, Ratio, Report, alternate, parse
from tests.bench.tools.place import own_server, pin, unpin

LAYOUT = Layout("topk", 100, "f2")
AT_ONCE = 1_000
GENERATION = "20261120T000000Z-000000000001"
KEYS = Keyspace("bench")

Write = Callable[["redis.Redis"], None]
"""All records, into an empty server."""


@dataclass(frozen=True, slots=True)
class Case:
    """One table as the night writes it to disk, and the same records one by one."""

    root: Path
    manifest: Manifest
    part: Part
    names: list[str]
    records: list[bytes]


def make_case(root: Path, count: int, config: NightConfig) -> Case:
    """Random bytes: neither Redis nor the loader looks into a record."""
    rows = np.random.default_rng(0).bytes(count * LAYOUT.size_bytes)
    (root / "pages").write_bytes(rows)
    file = Artefact("pages", len(rows), "0" * 64)
    per_page = records_per_page(LAYOUT, config.page_bytes)
    entry = TablePart(0, -(-count // per_page), count, file, replace(file, path="sums"))
    producer = Producer("topk", "user_tower", "inner_product")
    table = Table("user_topk", "user", producer, LAYOUT, per_page, (entry,), ())
    items = ItemFiles(file, file, file, file, 0, 0)
    manifest = Manifest("bench", GENERATION, 0, 0, "", "", {}, items, {table.name: table}, {}, {}, file, ())
    size = LAYOUT.size_bytes
    return Case(
        root,
        manifest,
        Part(table, 0),
        [f"larder:1:bench:{GENERATION}:user_topk:{number:016x}" for number in range(count)],
        [rows[at : at + size] for at in range(0, len(rows), size)],
    )


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    config = NightConfig()
    count = 100_000 if options.quick else 200_000
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), count, config)
        report = Report("bulk_load", ("redis", "hiredis"))
        report.figures["entities"] = count
        report.figures["record bytes"] = LAYOUT.size_bytes
        report.figures["page bytes"] = case.part.table.page_bytes
        report.figures["placement"] = f"client on {pin(0, 0)}, redis on {pin(server.pid, -1)}, TCP on loopback"
        measure(report, case, server, config, options.rounds)
        unpin()
        with redis.Redis.from_url(server.url, protocol=2) as client:
            report.figures["redis"] = str(client.info("server")["redis_version"])
    report.show(options)


def writers(case: Case, config: NightConfig) -> dict[str, Write]:
    """Return the ways of writing, by name."""
    count = len(case.records)

    def one_by_one(client: "redis.Redis") -> None:
        pipeline = client.pipeline(transaction=False)
        for at in range(0, count, AT_ONCE):
            for name, record in zip(case.names[at : at + AT_ONCE], case.records[at : at + AT_ONCE], strict=True):
                pipeline.set(name, record)
            pipeline.execute()

    def mset(client: "redis.Redis") -> None:
        for at in range(0, count, AT_ONCE):
            names = case.names[at : at + AT_ONCE]
            client.mset(dict(zip(names, case.records[at : at + AT_ONCE], strict=True)))

    def load(client: "redis.Redis") -> None:
        load_part(
            client, KEYS, case.manifest, case.root, case.part,
            chunk_bytes=config.load_chunk_bytes,
        )  # fmt: skip

    return {"SET pipeline": one_by_one, "MSET": mset, "load_part": load}


def measure(report: Report, case: Case, server: RedisServer, config: NightConfig, rounds: int) -> None:
    """Rates are entities per second."""
    client = redis.Redis.from_url(server.url, protocol=3)
    count = len(case.records)

    def timed(write: Write) -> Callable[[], float]:
        def measure_rate() -> float:
            client.flushall(asynchronous=False)
            started_at = time.perf_counter()
            write(client)
            return count / (time.perf_counter() - started_at)

        return measure_rate

    ways = writers(case, config)
    for name, writer_name in (("vs_set_pipeline", "SET pipeline"), ("vs_mset", "MSET")):
        ratio_by_name = alternate(timed(ways[writer_name]), {"load": timed(ways["load_part"])}, rounds=rounds)
        report.ratios[name] = ratio_by_name["load"]
    client.close()
    size, bytes_per_record_by_writer = (
        LAYOUT.size_bytes,
        {name: held_by(write, count) for name, write in ways.items()},
    )
    for name, bytes_per_record in bytes_per_record_by_writer.items():
        report.figures[f"bytes per entity, {name}"] = round(bytes_per_record, 1)
    loader_bytes_per_record = bytes_per_record_by_writer["load_part"]
    report.ratios["bytes_over_payload"] = Ratio(loader_bytes_per_record / size, 1.0, 1, loader_bytes_per_record, size)
    report.promises["bytes_over_payload"] = Promise(minimum=1.0, maximum=1.01)


def held_by(write: Write, count: int) -> float:
    """Return memory per record in a fresh Redis: a used one returns memory only gradually."""
    with own_server() as fresh, redis.Redis.from_url(fresh.url, protocol=3) as client:
        used_bytes_before = int(client.info("memory")["used_memory"])
        write(client)
        return (int(client.info("memory")["used_memory"]) - used_bytes_before) / count


if __name__ == "__main__":
    main()
