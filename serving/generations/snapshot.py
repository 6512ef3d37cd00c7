"""Snapshot of one generation as this process holds it: tables, items, index, models, blocklist, default lists."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.config.events import EventsConfig
from cache.errors import CorruptArtefact
from cache.events.event_predictor import GenerationEvents
from cache.events.new_items import NewItemInputs
from cache.filters.attributes import AttributeColumn
from cache.filters.filtering import Filtering
from cache.format.directory import Directory
from cache.format.ids import hash_id, input_digest
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest, Table
from cache.format.seen_items import SeenItems
from cache.format.stream_position import Position
from cache.model.new_items import NO_NEW_ITEMS, NewItems
from cache.model.predictor import Predictor, live_files, open_event_models, open_predictor
from cache.model.ranking import Metric
from cache.model.runtime import Accelerator
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path, read_manifest
from cache.store.blocklist import Blocklist
from cache.tiers.reads import View
from serving.config.settings import Precision
from serving.requests.errors import Problem

_STAMPS = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class DefaultList:
    """Default list of a top-K table, used when nothing better exists: ordinals and scores, best first."""

    items: NDArray[np.uint32]
    scores: NDArray[np.float32]
    ordinals: Mapping[bytes, int]
    """Ordinals of the items, by their ids."""

    def among(self, raws: Iterable[bytes] | None) -> frozenset[int]:
        """Return the ordinals of the given ids that the list contains."""
        ordinals = self.ordinals
        return frozenset([ordinals[raw] for raw in raws or () if raw in ordinals])


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Parts of one generation in one immutable value: store, index and model can never be of two nights."""

    generation: str
    epoch: int
    published_at: str
    manifest: Manifest
    root: Path
    directories: Mapping[str, Directory]
    items: ItemTable
    view: View
    predictor: Predictor | None
    degraded: str | None
    defaults: Mapping[str, DefaultList]
    blocklist: Blocklist
    blocked: frozenset[int]
    blocked_ordinals: NDArray[np.int64]
    fallback: str | None = None
    """Reason why the live models run on the processor though another provider is configured."""
    filtering: Filtering | None = None
    """Filters over the items; None if the items have no attributes."""
    seen_items: SeenItems | None = None
    """Past items of users, if there are filters or events."""
    events: GenerationEvents | None = None
    """Events of the generation; None if the manifest lists none, or none are followed."""
    values_until: int = 0
    """Number of the position up to which the filters include values set by events."""
    new_items: NewItems = NO_NEW_ITEMS
    """Items that events brought and the night did not know."""
    new_items_version: int = 0
    """Version of `NewItemEvents` that `new_items` were made of."""
    blocked_stamp: int = field(default_factory=_STAMPS.__next__)
    """Number of the enforced blocklist, which grows with each change, of any namespace's list."""
    stamp: int = field(init=False, default_factory=_STAMPS.__next__)
    """Number of this exact value: the same generation with another blocklist or release has another number."""
    values_stamp: int = field(init=False, default_factory=_STAMPS.__next__)
    """Number of this value and its items' attributes, for answers that depend on these."""

    @classmethod
    def open(
        cls,
        store: ArtefactStore,
        generation: str,
        *,
        epoch: int,
        published_at: float,
        blocklist: Blocklist,
        precision: Precision,
        threads: int,
        cores: Sequence[int] = (),
        accelerator: Accelerator | None = None,
        events: EventsConfig | None = None,
    ) -> Self:
        """Fetch, verify, map and warm a generation; slow, so never on the event loop.

        A model or index that is damaged or does not open leaves the snapshot `degraded`: its pages still answer.
        """
        manifest = read_manifest(store, generation)
        guests = {live_file.path for live_file in live_files(manifest)}
        for artefact in manifest.artefacts():
            if artefact.path not in guests:
                fetch_checked(store, generation, artefact)
        root = store.local(generation_path(generation))
        directories = {
            name: Directory.open(root, entity_set)
            for name, entity_set in manifest.entity_sets.items()
        }
        items = ItemTable.open(root, manifest)
        predictor, degraded, fallback = open_predictor(
            store, manifest, items, precision, threads, cores, accelerator
        )
        seen_items = SeenItems.open(root, manifest, directories["user"])
        has = (
            None
            if events is None or seen_items is None
            else GenerationEvents.of(manifest, events.namespace)
        )
        if (
            events is not None
            and seen_items is not None
            and has is not None
            and predictor is not None
        ):
            opened = functools.partial(
                has.opened, manifest, root, items, seen_items, predictor, threads=threads, cores=cores,
                exact_bytes=events.exact_bytes,
            )  # fmt: skip
            has, degraded = open_event_models(store, manifest, opened, has)
        blocked, blocked_ordinals = _blocked_items(blocklist, items)
        return cls(
            generation=generation,
            epoch=epoch,
            published_at=_iso(published_at),
            manifest=manifest,
            root=root,
            directories=directories,
            items=items,
            view=View(generation, directories),
            predictor=predictor,
            degraded=degraded,
            fallback=fallback,
            defaults=read_defaults(manifest, root, items),
            blocklist=blocklist,
            blocked=blocked,
            blocked_ordinals=blocked_ordinals,
            filtering=Filtering.open(root, manifest, items),
            values_until=_events_until_number(manifest),
            seen_items=seen_items,
            events=has,
        )

    def with_blocklist(self, blocklist: Blocklist) -> Self:
        """Return a snapshot of this generation with another version of the blocklist."""
        blocked, ordinals = _blocked_items(blocklist, self.items, self.new_items)
        return dataclasses.replace(
            self, blocklist=blocklist, blocked=blocked, blocked_ordinals=ordinals,
            blocked_stamp=next(_STAMPS),
        )  # fmt: skip

    def with_new_items(self, new: NewItems, filtering: Filtering | None, version: int) -> Self:
        """Return a snapshot of this generation with these new items, whose attributes its filters include."""
        if new.digest == self.new_items.digest:
            return self._alike(new_items=new, filtering=filtering, new_items_version=version)
        blocked, _ = _blocked_items(self.blocklist, self.items, new)
        return dataclasses.replace(
            self, new_items=new, new_items_version=version, filtering=filtering, blocked=blocked,
        )  # fmt: skip

    def with_filtering(self, filtering: Filtering | None, values_until: int) -> Self:
        """Return a snapshot of this generation whose filters include values set by events up to a position."""
        return self._alike(filtering=filtering, values_until=values_until)

    def lacking_values(self) -> Self:
        """Return a snapshot whose filters are to be given again the values set since the night's position."""
        return self._alike(values_until=_events_until_number(self.manifest))

    def _alike(self, **changed_fields: Any) -> Self:
        changed_snapshot = dataclasses.replace(self, **changed_fields)
        # Events set values all day: answers that depend on none stay what they are.
        object.__setattr__(changed_snapshot, "stamp", self.stamp)
        return changed_snapshot

    @property
    def new_item_inputs(self) -> NewItemInputs | None:
        """Inputs that make an unknown item answerable; None without working models, or events."""
        return None if self.events is None else self.events.new_item_inputs

    @property
    def numbered(self) -> int:
        """Number of items that lists may name: those of the night, and after them the new ones."""
        return self.items.count + len(self.new_items.items)

    def numbers_of(self, raws: Sequence[bytes]) -> NDArray[np.int64]:
        """Return int64 [n] numbers of items, new ones too; -1 for an unknown id."""
        return self.new_items.numbers_of(raws, self.items.ordinals_of(raws))

    def released_as(self, epoch: int, published_at: float) -> Self:
        """Return a snapshot of this generation for a later release (a rollback to it, a restore)."""
        return dataclasses.replace(self, epoch=epoch, published_at=_iso(published_at))

    def table(self, name: str) -> Table:
        """Return the table of that name; raise Problem (404)."""
        table = self.manifest.tables.get(name)
        if table is None:
            raise Problem(
                404, "unknown_table", f"there is no table {name!r}",
                field="table", tables=sorted(self.manifest.tables),
            )  # fmt: skip
        return table

    @property
    def has_blocked_entities(self) -> bool:
        """True if any entity must not be served."""
        return bool(self.blocklist.entities or self.blocklist.items or self.blocklist.users)

    def changed_facet(self, table: Table) -> AttributeColumn | None:
        """Return the attribute of a facet's table if events changed some item's value since its lists were made."""
        filtering, events = self.filtering, self.manifest.events
        if filtering is None or not filtering.changed_attributes or events is None:
            return None
        name = events.facets.get(table.name)
        return filtering.attributes.columns[name] if name in filtering.changed_attributes else None

    def digest_without_input(self, table: Table) -> bytes | None:
        """Return the digest of a missing input: an item is its own input; None for other entities."""
        return self.digest_of_nothing if table.entity == "item" else None

    @property
    def digest_of_nothing(self) -> bytes:
        """Input digest of an item that is its own input."""
        return _digest_of_nothing("" if self.predictor is None else self.predictor.model_digest)

    def knows(self, table: Table, raw: bytes) -> bool:
        """True if the night knew the entity."""
        directory = self.directories[table.entity]
        return directory.find(hash_id(raw, directory.seed)) >= 0

    def had_by_night(self, table: Table, position: int) -> NDArray[np.int64]:
        """Return ordinals int64 of the past items of the user at a position (-1: unknown), which lists leave out.

        Empty if the generation does not keep them (it has neither attributes of items nor events).
        """
        is_list_of_user = table.kind == "topk" and table.entity == "user"
        if self.seen_items is None or not is_list_of_user or position < 0:
            return np.empty(0, np.int64)
        return self.seen_items.of(position)

    def blocks(self, table: Table, raw: bytes | None) -> bool:
        """True if the entity itself must not be served (also when it is blocked as an item or a user)."""
        if raw is None:
            return False
        blocklist = self.blocklist
        of_its_kind = {"item": blocklist.items, "user": blocklist.users}.get(table.entity, ())
        return raw in blocklist.entities or raw in of_its_kind


@functools.lru_cache(maxsize=16)
def _digest_of_nothing(model_digest: str) -> bytes:
    return input_digest(model_digest, None, None)


def _events_until_number(manifest: Manifest) -> int:
    return 0 if manifest.events is None else Position.parse(manifest.events.until).number


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _blocked_items(
    blocklist: Blocklist, items: ItemTable, new_items: NewItems = NO_NEW_ITEMS
) -> tuple[frozenset[int], NDArray[np.int64]]:
    """Return (numbers of all blocked items, ordinals of the nightly ones among them)."""
    raws = sorted(blocklist.items)
    ordinals = items.ordinals_of(raws)
    known_ordinals: NDArray[np.int64] = np.sort(ordinals[ordinals >= 0])
    numbers = new_items.numbers_of(raws, ordinals)
    return frozenset(numbers[numbers >= 0].tolist()), known_ordinals


def read_defaults(manifest: Manifest, root: Path, items: ItemTable) -> dict[str, DefaultList]:
    """Read a generation's defaults by table; raise CorruptArtefact if they do not fit its items.

    Tables of items have none: popular items suit an unknown user, but are not similar to an item.
    """
    raw = (root / manifest.defaults.path).read_bytes()
    try:
        document = orjson.loads(raw)
        defaults = {}
        for name, default_list in document.items():
            if name in manifest.tables and manifest.tables[name].entity == "item":
                continue
            raws = [id_.encode() for id_ in default_list["items"]]
            ordinals = items.ordinals_of(raws)
            if (ordinals < 0).any() or len(ordinals) != len(default_list["scores"]):
                raise CorruptArtefact(f"the defaults of {name} do not fit the item table")
            defaults[name] = DefaultList(
                ordinals.astype(np.uint32),
                np.array(default_list["scores"], np.float32),
                dict(zip(raws, ordinals.tolist(), strict=True)),
            )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtefact(f"{manifest.defaults.path} cannot be read: {error}") from error
    return defaults


def user_vector_table(snapshot: Snapshot) -> Table:
    """Return the table of user vectors that can be multiplied with item vectors; raise Problem (404) without one."""
    dims = snapshot.manifest.items.dims
    for table in snapshot.manifest.tables.values():
        if table.kind == "vector" and table.entity == "user" and table.layout.width == dims:
            return table
    raise Problem(
        404, "unknown_table", "this generation has no user vectors to score with", field="table"
    )


def ranking_metric(snapshot: Snapshot, table: Table | None = None) -> Metric:
    """Return the metric by which the night ranked the lists of a table, or of users; inner product by default."""
    manifest = snapshot.manifest
    for candidate_table in [table] if table is not None else manifest.tables.values():
        name = candidate_table.producer.index
        is_ranked = table is not None or candidate_table.producer.kind == "topk"
        if is_ranked and name is not None and name in manifest.indexes:
            return manifest.indexes[name].metric
    return "inner_product"
