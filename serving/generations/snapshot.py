"""Snapshot of one generation in this process: tables, items, index, models, blocklist, default lists."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.directory import Directory
from cache.format.ids import hash_id, input_digest
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest, Table
from cache.format.seen_items import SeenItems
from cache.model.new_items import NO_NEW_ITEMS, NewItems
from cache.model.predictor import ModelPrecision, Predictor, live_files, open_predictor
from cache.model.ranking import Metric
from cache.model.runtime import Accelerator
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path, read_manifest
from cache.store.blocklist import Blocklist
from cache.tiers.reads import SnapshotView
from serving.requests.errors import Problem

_STAMP_COUNTER = itertools.count(1)

Part = TypeVar("Part")


class ItemValues(Protocol):
    """Current values of one attribute of a generation's items."""

    def mask_having_text(self, attribute_text: str, item_ordinals: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the items that have the text as a value."""


@dataclass(frozen=True, slots=True, eq=False)
class DefaultList:
    """Default list of a top-K table, the last fallback: ordinals and scores, best first."""

    item_ordinals: NDArray[np.uint32]
    item_scores: NDArray[np.float32]
    ordinal_by_id: Mapping[bytes, int]
    """Ordinals by item id."""

    def ordinals_among(self, entity_ids: Iterable[bytes] | None) -> frozenset[int]:
        """Return the ordinals of the given ids that the list contains."""
        ordinal_by_id = self.ordinal_by_id
        return frozenset([ordinal_by_id[entity_id] for entity_id in entity_ids or () if entity_id in ordinal_by_id])


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Parts of one generation in one immutable value: tables, index and model are always of the same night."""

    generation: str
    epoch: int
    published_at: str
    manifest: Manifest
    generation_folder: Path
    directories: Mapping[str, Directory]
    items: ItemTable
    view: SnapshotView
    predictor: Predictor | None
    degraded_reason: str | None
    default_list_by_table: Mapping[str, DefaultList]
    blocklist: Blocklist
    blocked_item_numbers: frozenset[int]
    blocked_item_ordinals: NDArray[np.int64]
    fallback_reason: str | None = None
    """Reason why live models run on the CPU although another provider is configured."""
    seen_items: SeenItems | None = None
    """Past items of users, if there are filters or events."""
    part_by_class: Mapping[type, Any] = field(default_factory=dict)
    """Parts of the generation that features opened, by class."""
    changed_values_by_facet: Mapping[str, ItemValues] = field(default_factory=dict)
    """By facet table: current values of its attribute, if an item's value has changed since the night."""
    changed_filter_names: frozenset[str] = frozenset()
    """Named filters that other items may pass now than in the night."""
    new_items: NewItems = NO_NEW_ITEMS
    """Items that lists may name although the night did not know them."""
    blocklist_stamp: int = field(default_factory=_STAMP_COUNTER.__next__)
    """Number of the enforced blocklist; grows with each change of any namespace's list."""
    stamp: int = field(init=False, default_factory=_STAMP_COUNTER.__next__)
    """Number that is unique to this value: the same generation with another blocklist or release has another number."""
    item_values_stamp: int = field(init=False, default_factory=_STAMP_COUNTER.__next__)
    """Like `stamp`, but also changes with items' attributes, for answers that depend on them."""

    @classmethod
    def open(
        cls,
        store: ArtefactStore,
        generation: str,
        *,
        epoch: int,
        published_at: float,
        blocklist: Blocklist,
        precision: ModelPrecision,
        thread_count: int,
        core_numbers: Sequence[int] = (),
        accelerator: Accelerator | None = None,
    ) -> Self:
        """Fetch, verify, map and warm a generation; slow, so not for the event loop.

        If a model or index does not open, the snapshot is `degraded_reason`: its pages still answer.
        """
        manifest = read_manifest(store, generation)
        live_file_paths = {live_file.path for live_file in live_files(manifest)}
        for artefact in manifest.served_artefacts():
            if artefact.path not in live_file_paths:
                fetch_checked(store, generation, artefact)
        root = store.local(generation_path(generation))
        directories = {name: Directory.open(root, entity_set) for name, entity_set in manifest.entity_sets.items()}
        items = ItemTable.open(root, manifest)
        predictor, degraded, fallback = open_predictor(
            store, manifest, items, precision, thread_count, core_numbers, accelerator
        )
        blocked, blocked_ordinals = _blocked_items(blocklist, items)
        return cls(
            generation=generation,
            epoch=epoch,
            published_at=_iso_time(published_at),
            manifest=manifest,
            generation_folder=root,
            directories=directories,
            items=items,
            view=SnapshotView(generation, directories),
            predictor=predictor,
            degraded_reason=degraded,
            fallback_reason=fallback,
            default_list_by_table=read_defaults(manifest, root, items),
            blocklist=blocklist,
            blocked_item_numbers=blocked,
            blocked_item_ordinals=blocked_ordinals,
            seen_items=SeenItems.open(root, manifest, directories["user"]),
        )

    def with_blocklist(self, blocklist: Blocklist) -> Self:
        """Return a snapshot of this generation with another version of the blocklist."""
        blocked, blocked_ordinals = _blocked_items(blocklist, self.items, self.new_items)
        return dataclasses.replace(
            self, blocklist=blocklist, blocked_item_numbers=blocked, blocked_item_ordinals=blocked_ordinals,
            blocklist_stamp=next(_STAMP_COUNTER),
        )  # fmt: skip

    def with_new_items(self, new_items: NewItems) -> Self:
        """Return a snapshot of this generation whose lists may name these new items."""
        if new_items.digest == self.new_items.digest:
            return self.with_same_stamp(new_items=new_items)
        blocked, _ = _blocked_items(self.blocklist, self.items, new_items)
        return dataclasses.replace(self, new_items=new_items, blocked_item_numbers=blocked)

    def part(self, part_class: type[Part]) -> Part | None:
        """Return the part of this class that a feature opened; None if there is none."""
        part: Part | None = self.part_by_class.get(part_class)
        return part

    def with_part(self, part: object) -> Self:
        """Return a snapshot with this part, replacing that of the same class."""
        return self.with_same_stamp(part_by_class={**self.part_by_class, type(part): part})

    def with_same_stamp(self, **changed_fields: Any) -> Self:
        """Return a snapshot with changed fields that affect only answers by attributes of items."""
        changed_snapshot = dataclasses.replace(self, **changed_fields)
        object.__setattr__(changed_snapshot, "stamp", self.stamp)
        return changed_snapshot

    @property
    def nameable_item_count(self) -> int:
        """Number of items that lists may name: nightly items and new items."""
        return self.items.count + len(self.new_items.items)

    def numbers_of(self, raw_ids: Sequence[bytes]) -> NDArray[np.int64]:
        """Return the numbers int64[n] of items, including new items; -1 for an unknown id."""
        return self.new_items.item_numbers_of(raw_ids, self.items.ordinals_of(raw_ids))

    def released_as(self, epoch: int, published_at: float) -> Self:
        """Return a snapshot of this generation for a later release (a rollback to it, a restore)."""
        return dataclasses.replace(self, epoch=epoch, published_at=_iso_time(published_at))

    def table(self, table_name: str) -> Table:
        """Return the table of that name; raise Problem (404)."""
        table = self.manifest.tables.get(table_name)
        if table is None:
            raise Problem(
                404, "unknown_table", f"there is no table {table_name!r}",
                field="table", tables=sorted(self.manifest.tables),
            )  # fmt: skip
        return table

    @property
    def has_blocked_entities(self) -> bool:
        """True if any entity must not be served."""
        return bool(self.blocklist.entities or self.blocklist.items or self.blocklist.users)

    def digest_without_input(self, table: Table) -> bytes | None:
        """Return the digest of a missing input: an item is its own input; None for other entities."""
        return self.digest_of_nothing if table.entity == "item" else None

    @property
    def digest_of_nothing(self) -> bytes:
        """Digest of a missing input, used for items, which are their own input."""
        return _digest_of_nothing("" if self.predictor is None else self.predictor.model_digest)

    def knows_entity(self, table: Table, raw_id: bytes) -> bool:
        """True if the night knew the entity."""
        directory = self.directories[table.entity]
        return directory.find_position(hash_id(raw_id, directory.seed)) >= 0

    def past_item_ordinals(self, table: Table, user_position: int) -> NDArray[np.int64]:
        """Return ordinals int64 of the past items of the user at a position (-1: unknown), which lists leave out.

        Empty if the generation does not keep them (it has neither attributes of items nor events).
        """
        is_list_of_user = table.kind == "topk" and table.entity == "user"
        if self.seen_items is None or not is_list_of_user or user_position < 0:
            return np.empty(0, np.int64)
        return self.seen_items.ordinals_of(user_position)

    def blocks_entity(self, table: Table, raw_id: bytes | None) -> bool:
        """True if the entity itself must not be served (also when it is blocked as an item or a user)."""
        if raw_id is None:
            return False
        blocklist = self.blocklist
        blocked_of_kind = {"item": blocklist.items, "user": blocklist.users}.get(table.entity, ())
        return raw_id in blocklist.entities or raw_id in blocked_of_kind


@functools.lru_cache(maxsize=16)
def _digest_of_nothing(model_digest: str) -> bytes:
    return input_digest(model_digest, None, None)


def _iso_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _blocked_items(
    blocklist: Blocklist, items: ItemTable, new_items: NewItems = NO_NEW_ITEMS
) -> tuple[frozenset[int], NDArray[np.int64]]:
    """Return (numbers of all blocked items, ordinals of the blocked nightly items)."""
    blocked_ids = sorted(blocklist.items)
    ordinals = items.ordinals_of(blocked_ids)
    known_ordinals: NDArray[np.int64] = np.sort(ordinals[ordinals >= 0])
    numbers = new_items.item_numbers_of(blocked_ids, ordinals)
    return frozenset(numbers[numbers >= 0].tolist()), known_ordinals


def read_defaults(manifest: Manifest, generation_folder: Path, items: ItemTable) -> dict[str, DefaultList]:
    """Read a generation's defaults by table; raise CorruptArtefact if they do not fit its items.

    Item tables have no defaults: popular items suit an unknown user, but are not similar to a given item.
    """
    document_bytes = (generation_folder / manifest.defaults.path).read_bytes()
    try:
        document = orjson.loads(document_bytes)
        defaults = {}
        for table_name, default_list in document.items():
            if table_name in manifest.tables and manifest.tables[table_name].entity == "item":
                continue
            item_ids = [item_id.encode() for item_id in default_list["items"]]
            ordinals = items.ordinals_of(item_ids)
            if (ordinals < 0).any() or len(ordinals) != len(default_list["scores"]):
                raise CorruptArtefact(f"the defaults of {table_name} do not fit the item table")
            defaults[table_name] = DefaultList(
                ordinals.astype(np.uint32),
                np.array(default_list["scores"], np.float32),
                dict(zip(item_ids, ordinals.tolist(), strict=True)),
            )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtefact(f"{manifest.defaults.path} cannot be read: {error}") from error
    return defaults


def user_vector_table(snapshot: Snapshot) -> Table:
    """Return the table of user vectors in the space of item vectors; raise Problem (404) without one."""
    dims = snapshot.manifest.items.dims
    for table in snapshot.manifest.tables.values():
        if table.kind == "vector" and table.entity == "user" and table.layout.width == dims:
            return table
    raise Problem(404, "unknown_table", "this generation has no user vectors to score with", field="table")


def ranking_metric(snapshot: Snapshot, table: Table | None = None) -> Metric:
    """Return the metric by which the night ranked a table's lists, or those of users; default: inner product."""
    manifest = snapshot.manifest
    for candidate_table in [table] if table is not None else manifest.tables.values():
        index_name = candidate_table.producer.index
        is_ranked = table is not None or candidate_table.producer.kind == "topk"
        if is_ranked and index_name is not None and index_name in manifest.indexes:
            return manifest.indexes[index_name].metric
    return "inner_product"
