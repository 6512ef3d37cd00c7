"""Copies of generations on hosts, as these have recorded them in the store: an erasure waits until they are gone."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import orjson

from cache.errors import Conflict
from cache.store.artefacts import ArtefactStore
from cache.store.host_copies import FOLDER, record_path

_LEFT_OUT_FILE = "begun.json"
"""File beside the records of a generation: what it left out, kept for when its own files are gone."""


@dataclass(frozen=True, slots=True)
class EntityHolder:
    """Holder of an entity: a generation; with `host`, only that host's copies of it.

    These are there since `at` (Unix seconds, by that host's clock).
    """

    generation: str
    host: str = ""
    at: float = 0.0

    @property
    def is_copy(self) -> bool:
        """True if only a host has it."""
        return bool(self.host)


def note_left_out(store: ArtefactStore, generation: str, numbers: Iterable[int]) -> None:
    """Keep the numbers of the erasures that a generation leaves out, before any host has a copy of it."""
    if store.copies is not None:
        body = orjson.dumps({"erased": list(numbers)})
        store.write(f"{FOLDER}/{generation}/{_LEFT_OUT_FILE}", body)


def left_out(store: ArtefactStore, generation: str) -> set[int]:
    """Numbers of the erasures a generation leaves out; none where that cannot be told: every erasure counts as held."""
    raw = store.read(f"{FOLDER}/{generation}/{_LEFT_OUT_FILE}")
    try:
        return set() if raw is None else set(orjson.loads(raw)["erased"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return set()


def copies_on_hosts(store: ArtefactStore, *, but: Collection[str] = ()) -> list[EntityHolder]:
    """Copies that are recorded, of generations other than `but`; of a local store nothing is a copy."""
    if store.copies is None:
        return []
    hosts = [
        (generation, name.removesuffix(".json"))
        for generation in store.names(FOLDER)
        if generation not in but
        for name in store.names(f"{FOLDER}/{generation}")
        if name.endswith(".json") and name != _LEFT_OUT_FILE
    ]
    bodies = store.read_many([record_path(*generation_and_host) for generation_and_host in hosts])
    return [
        EntityHolder(*generation_and_host, _at(bodies[path]))
        for generation_and_host in hosts
        if (path := record_path(*generation_and_host)) in bodies
    ]


def _at(raw: bytes) -> float:
    try:
        return float(orjson.loads(raw)["at"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return 0.0  # the name says all that matters


def declare_gone(store: ArtefactStore, pattern: str) -> list[EntityHolder]:
    """Forget the copies of hosts that will never run again, by name or pattern; raises Conflict when none has any."""
    copies = copies_on_hosts(store)
    gone_copies = [copy for copy in copies if fnmatchcase(copy.host, pattern)]
    if not gone_copies:
        hosts_text = ", ".join(sorted({copy.host for copy in copies})) or "no host"
        raise Conflict(f"no copy is recorded of a host {pattern!r}; {hosts_text} has some")
    for copy in gone_copies:
        store.delete(record_path(copy.generation, copy.host))
    return gone_copies


def sweep_notes(store: ArtefactStore, needed_generations: Collection[str]) -> None:
    """Remove what was noted of generations that no host, and not the store, has any more."""
    if store.copies is None:
        return
    existing_generations = {*store.names("generations"), *needed_generations}
    for generation in store.names(FOLDER):
        if generation not in existing_generations and store.names(f"{FOLDER}/{generation}") == [
            _LEFT_OUT_FILE
        ]:
            store.delete(f"{FOLDER}/{generation}")
