"""Command `worklist`: ids that callers request and no night knows, most requested first.

A night scores all users with complete inputs in its sources; this command lists other requested ids, so that the owner
of the sources can add them. It does not change the order of scoring, since a generation is published as a whole.
"""

import argparse
import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from cache.control.control_keys import Control
from cache.errors import ConfigError, LarderError, StoreError
from cache.format.directory import Directory
from cache.format.ids import hash_id
from cache.l2.sync_clients import connect
from cache.process.command_line import printable
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path, read_manifest
from cache.store.blocklist import latest_blocklist
from cache.store.erasures import all_erasures
from cache.usage.hot_keys import COLD_WINDOW, EntityName, window_number_of
from precompute.config.console import OutputContent, err_console
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.partitions import holdout


class WorklistRow(NamedTuple):
    """Row of the worklist; `standing`: known (to the live generation), coming (acted after the cut) or no input."""

    table: str
    entity: str
    reads: int
    standing: str


def worklist(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> OutputContent:
    """Return the ids as a table, and write them to a file if one is given."""
    if arguments.limit < 1:
        raise ConfigError(f"--limit must be 1 or more, not {arguments.limit}", field="limit")
    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        control = Control(client, config.keyspace())
        read_count_by_id, pointer = read_cold_counts(control), control.read_pointer()
    worklist_rows = make_rows(store, read_count_by_id, None if pointer is None else pointer.generation)
    if arguments.export is not None:
        write_csv(worklist_rows, Path(arguments.export))
    if arguments.json:
        json_rows = [row._asdict() for row in worklist_rows[: arguments.limit]]
        return {"ids": len(worklist_rows), "rows": json_rows}
    table = Table("table", "id", "reads", "standing")
    table.columns[2].justify = "right"
    for row in worklist_rows[: arguments.limit]:
        table.add_row(row.table, Text(printable(row.entity)), str(row.reads), row.standing)
    count_by_standing = Counter(row.standing for row in worklist_rows)
    standings_text = ", ".join(f"{count} {standing}" for standing, count in count_by_standing.most_common())
    return [table, f"{len(worklist_rows)} ids: {standings_text}" if worklist_rows else "no unknown id was requested"]


def read_cold_counts(control: Control) -> dict[EntityName, int]:
    """Return the number of requests without an answer by table and id, today and yesterday, over all replicas."""
    current_day, read_count_by_id = (window_number_of(control.time(), COLD_WINDOW), Counter[EntityName]())
    for counted_day in (current_day, current_day - 1):
        key = control.keyspace.cold_names(counted_day)
        raw_id_and_count_pairs: Any = control.client.zrevrange(key, 0, -1, withscores=True)
        for raw_table_and_id, count in raw_id_and_count_pairs:
            table, _, entity_id = raw_table_and_id.partition(b":")
            read_count_by_id[table.decode(errors="replace"), entity_id] += int(count)
    return dict(read_count_by_id)


def make_rows(
    store: ArtefactStore, read_count_by_id: Mapping[EntityName, int], live_generation: str | None
) -> list[WorklistRow]:
    """Return the rows, most requested first, without blocked and erased ids."""
    excluded_ids = {erasure.raw_id for erasure in all_erasures(store) if erasure.is_in_force}
    blocklist = latest_blocklist(store)
    excluded_ids |= set(blocklist.entities) | set(blocklist.users) | set(blocklist.items)
    known_entities = KnownEntities(store, live_generation)
    rows = [
        WorklistRow(table, entity_id.decode(errors="replace"), count, known_entities.standing(table, entity_id))
        for (table, entity_id), count in read_count_by_id.items()
        if entity_id not in excluded_ids
    ]
    return sorted(rows, key=lambda row: (-row.reads, row.table, row.entity))


class KnownEntities:
    """Entities that the live generation knows, and a bounded sample of users who acted after its cut."""

    def __init__(self, store: ArtefactStore, live_generation: str | None) -> None:
        self._entity_by_table: dict[str, str] = {}
        self._directory_by_entity: dict[str, Directory] = {}
        self._coming_user_ids: frozenset[str] = frozenset()
        if live_generation is None:
            return
        try:
            manifest = read_manifest(store, live_generation)
            root = store.local(generation_path(live_generation))
            self._entity_by_table = {name: table.entity for name, table in manifest.tables.items()}
            for name, entity_set in manifest.entity_sets.items():
                for part in entity_set.parts:
                    fetch_checked(store, live_generation, part.file)
                self._directory_by_entity[name] = Directory.open(root, entity_set)
            store.fetch(generation_path(live_generation, holdout.HOLDOUT_FILE))
            self._coming_user_ids = frozenset(holdout.read_holdout(root))
        except (StoreError, FileNotFoundError):  # a missing holdout only turns "coming" into "no input"
            return
        except LarderError as error:
            err_console.print(f"{live_generation} cannot be read: {error.message}", markup=False)

    def standing(self, table_name: str, entity_id: bytes) -> str:
        """Return the standing of an id: "known", "coming" or "no input"."""
        entity = self._entity_by_table.get(table_name)
        directory = self._directory_by_entity.get(str(entity))
        if directory is not None and directory.find_position(hash_id(entity_id, directory.seed)) >= 0:
            return "known"
        if entity == "user" and entity_id.decode(errors="replace") in self._coming_user_ids:
            return "coming"
        return "no input"


def write_csv(worklist_rows: Sequence[WorklistRow], csv_path: Path) -> None:
    """Write the rows as CSV with a header, for the owner of the sources; ids are quoted if necessary."""
    with csv_path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(WorklistRow._fields)
        writer.writerows(worklist_rows)
