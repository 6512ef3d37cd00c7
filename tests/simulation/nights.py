"""Small generations whose records show their night, and a model that remembers what it computed.

Score of a record: 100 times the night's number, 50 more for what the model computed, and the rank. Items follow from
the user and the night, or from the last of the history. So an answer alone tells where it can have come from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.format.directory import Directory
from cache.format.ids import fingerprints, hash_ids
from cache.format.item_table import ItemTable
from cache.format.manifest import Artefact, DirectoryPart, EntitySet, ItemFiles, Manifest, Producer, Table, TablePart
from cache.model.input_preparation import LiveInput, PreparedInput, prepare_all
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.records import FLAG_LIVE, Layout, encode_topk
from cache.store.blocklist import Blocklist
from cache.tiers.reads import SnapshotView
from serving.generations.snapshot import DefaultList, Snapshot

OWN_NAMESPACE = "default"
"""Namespace that the service serves."""
FIRST_NIGHTS = {OWN_NAMESPACE: 1, "arm-b": 150, "arm-c": 250}
"""First number of a night of each namespace, so that a generation tells which namespace it is of."""
ARMS = tuple(name for name in FIRST_NIGHTS if name != OWN_NAMESPACE)
"""Namespaces of arms."""
TABLE = "user_topk"
WIDTH = 5
COUNT = 30
USERS = tuple(f"u{number}" for number in range(24))
STRANGERS = tuple(f"x{number}" for number in range(8))
"""Users whom no night knows."""
ITEMS = tuple(f"i{number}" for number in range(COUNT))
PER_PAGE = 6
DATA_UNTIL = 1_800_000_000
LIVE = 50.0
LAYOUT = Layout("topk", WIDTH, "f4")
_SEEDS = {"user": 7, "item": 11}
_TOWER = TowerSpec((InputSpec("history", "history", "int64", max_length=8, pad=0),), "vector", 4)
_NO_FILE = Artefact("none", 0, "")


def generation_of(number: int) -> str:
    """Return the id of the night with that number: later nights have later data."""
    return f"2027{1 + number // 28:02d}{1 + number % 28:02d}T000000Z-{number:012x}"


@lru_cache(maxsize=64)
def number_of(generation: str) -> int:
    """Return the number of a night."""
    return int(generation.rpartition("-")[2], 16)


def namespace_of(number: int) -> str:
    """Return the namespace of the night with that number."""
    return max((first, name) for name, first in FIRST_NIGHTS.items() if first <= number)[1]


def knows(number: int, user: str) -> bool:
    """Return whether that night has a record of the user: each night lacks some that others have."""
    return user in USERS and (int(user[1:]) + number) % 5 != 0


def night_list(number: int, user: str) -> list[str]:
    """Return the items that the night recommends, best first."""
    start = 3 * int(user[1:]) + 7 * number
    return [ITEMS[(start + step) % COUNT] for step in range(WIDTH)]


def live_list(last: str, excluded_items: frozenset[str]) -> list[str]:
    """Return the items that the model recommends after the last of a history."""
    start = ITEMS.index(last)
    following_items = [ITEMS[(start + step) % COUNT] for step in range(1, COUNT + 1)]
    return [item for item in following_items if item not in excluded_items][:WIDTH]


def default_list() -> list[str]:
    """Return the default items."""
    return list(ITEMS)


@lru_cache(maxsize=1)
def _items() -> ItemTable:
    directory, raws = _directory("item", ITEMS)
    ids = np.frombuffer(b"".join(raws), np.uint8)
    offsets = np.cumsum([0] + [len(raw) for raw in raws]).astype(np.uint64)
    vectors = np.ones((COUNT, 4), np.float32)
    return ItemTable(directory, ids, offsets, vectors, np.arange(COUNT, dtype=np.int64))


def forget() -> None:
    """Discard all nights and process-wide caches, so that no simulation depends on an earlier one."""
    night.cache_clear()
    _items()
    assert LAYOUT.dtype.itemsize == LAYOUT.size_bytes  # found once, too


def _directory(name: str, ids: Sequence[str]) -> tuple[Directory, list[bytes]]:
    raws = [entity_id.encode() for entity_id in ids]
    hashes = hash_ids(raws, _SEEDS[name])
    order = np.argsort(hashes)
    return Directory(_SEEDS[name], [0], [hashes[order]]), [raws[index] for index in order]


@dataclass(frozen=True, eq=False)
class Night:
    """A generation: its manifest, and its opened form."""

    number: int
    generation: str
    directories: Mapping[str, Directory]
    table: Table
    pages: tuple[bytes, ...]
    default: DefaultList

    def manifest(self, verdict: int, passed: bool = True) -> Manifest:
        """Return the manifest; `verdict` numbers verifications (0: none yet)."""
        user_count = self.directories["user"].count
        gates = ({"rule": "any", "passed": passed, "number": verdict},) if verdict else ()
        return Manifest(
            namespace=namespace_of(self.number), generation=self.generation, data_until=DATA_UNTIL + self.number,
            created_at=DATA_UNTIL + self.number, bundle_digest="", inputs_digest="",
            entity_sets={
                "user": EntitySet("user", 7, user_count, (DirectoryPart(0, user_count, _NO_FILE),)),
                "item": EntitySet("item", 11, COUNT, (DirectoryPart(0, COUNT, _NO_FILE),)),
            },
            items=ItemFiles(_NO_FILE, _NO_FILE, _NO_FILE, _NO_FILE, COUNT, 4),
            tables={TABLE: self.table}, models={}, indexes={}, defaults=_NO_FILE, gates=gates,
        )  # fmt: skip


@lru_cache(maxsize=64)
def night(number: int) -> Night:
    """Return the night with that number, always the same one."""
    users, raws = _directory("user", [user for user in USERS if knows(number, user)])
    items = _items()
    lists = [items.ordinals_of([item.encode() for item in night_list(number, raw.decode())]) for raw in raws]
    best_first = np.arange(WIDTH, 0, -1).astype(np.float32)
    scores = np.tile(100.0 * number + best_first, (len(raws), 1)).astype(np.float32)
    rows = encode_topk(LAYOUT, fingerprints(raws), np.array(lists, np.uint32), scores, DATA_UNTIL + number).tobytes()
    page_bytes = PER_PAGE * LAYOUT.size_bytes
    pages = tuple(rows[at : at + page_bytes] for at in range(0, len(rows), page_bytes))
    part = TablePart(0, len(pages), len(raws), _NO_FILE, _NO_FILE)
    table = Table(TABLE, "user", Producer("topk", "user_tower"), LAYOUT, PER_PAGE, (part,), ())
    ordinals = items.ordinals_of([item.encode() for item in ITEMS])
    default = DefaultList(
        ordinals.astype(np.uint32),
        (100.0 * number + 10 + np.linspace(1, 0, COUNT)).astype(np.float32),
        {item.encode(): int(ordinal) for item, ordinal in zip(ITEMS, ordinals, strict=True)},
    )
    return Night(number, generation_of(number), {"user": users, "item": items.directory}, table, pages, default)


@dataclass
class Model:
    """The live model of a night; `compute` is called for each batch, and may take its time or raise."""

    number: int
    compute: Callable[[list[tuple[int, int, tuple[int, ...]]]], None]
    precisions: Mapping[str, str] = field(default_factory=dict)

    @property
    def model_digest(self) -> str:
        """Digest of the night's only model."""
        return f"model-{self.number}"

    def supports(self, table: str) -> bool:
        """Return whether it is the only table."""
        return table == TABLE

    def prepare_all(self, table: str, sources: Sequence[LiveInput]) -> list[PreparedInput | InvalidInput | None]:
        """Prepare inputs as the real predictor does for a tower of histories."""
        return prepare_all(table, _TOWER, _items(), sources)

    def predict(
        self,
        table: str,
        batch: Sequence[PreparedInput],
        prints: Sequence[int],
        scored_at: int,
        *,
        blocked_ordinals: NDArray[np.int64],
    ) -> list[bytes]:
        """Return one record for each input."""
        self.compute([
            (self.number, print_, tuple(prepared.history.tolist()))
            for prepared, print_ in zip(batch, prints, strict=True)
        ])  # fmt: skip
        items, blocked_set = _items(), set(blocked_ordinals.tolist())
        lists = np.full((len(batch), WIDTH), 0xFFFFFFFF, np.uint32)
        scores = np.zeros((len(batch), WIDTH), np.float32)
        for row, prepared in enumerate(batch):
            excluded_items = frozenset(
                items.id_of(ordinal) for ordinal in {*prepared.excluded_ordinals.tolist(), *blocked_set}
            )
            live_items = live_list(items.id_of(int(prepared.history[-1])), excluded_items)
            lists[row, : len(live_items)] = items.ordinals_of([item.encode() for item in live_items])
            best_first = np.arange(WIDTH, WIDTH - len(live_items), -1)
            scores[row, : len(live_items)] = 100.0 * self.number + LIVE + best_first
        rows = encode_topk(LAYOUT, np.array(prints, np.uint64), lists, scores, scored_at, flags=FLAG_LIVE)
        data, size = rows.tobytes(), LAYOUT.size_bytes
        return [data[at : at + size] for at in range(0, len(data), size)]


def snapshot(number: int, model: Model | None) -> Snapshot:
    """Return the night as a replica opens it, without releases and blocklist; without a model it is degraded."""
    simulated_night = night(number)
    return Snapshot(
        generation=simulated_night.generation, epoch=0, published_at="", manifest=simulated_night.manifest(1),
        generation_folder=Path("/nowhere"), directories=simulated_night.directories, items=_items(),
        view=SnapshotView(simulated_night.generation, simulated_night.directories), predictor=model,  # type: ignore[arg-type]
        degraded_reason=None if model is not None else "the model does not open",
        default_list_by_table={TABLE: simulated_night.default}, blocklist=Blocklist(), blocked_item_numbers=frozenset(),
        blocked_item_ordinals=np.empty(0, np.int64),
    )  # fmt: skip
