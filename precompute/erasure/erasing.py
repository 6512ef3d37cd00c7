"""Erasure of an entity: it is blocked at once, left out from the next night on, and done when nothing holds it."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cache.control.control_keys import Control
from cache.control.states import UNFINISHED_STATES, GenerationState
from cache.errors import Conflict, LarderError
from cache.format.ids import hash_id
from cache.format.manifest import EntityKind, Manifest
from cache.format.redis_keys import hash_hex
from cache.store.artefacts import ArtefactStore, read_manifest
from cache.store.blocklist import change_blocklist, latest_blocklist
from cache.store.erasures import Erasure, all_erasures, find_erasure, mark_done, mark_forgotten, request_erasure
from cache.usage.hot_keys import COLD_WINDOW, HOT_WINDOW, Window, sketch_member_of, window_number_of
from precompute.builds.tables import ENTITY_BY_TABLE_KIND
from precompute.bundles.bundle_store import remove_bundles_with_items
from precompute.config.settings import NightConfig, retained_count
from precompute.erasure.holders import EntityHolder, holders_by_erasure_number, sweep_left_out_notes
from precompute.events.stream import forget_events
from precompute.releases.release_log import Releases, ReleaseView, demand_reason
from precompute.traffic.exposures import forget_keys

UNLINK_BATCH_KEYS = 256
LIKELY_HASH_SEEDS = (0, 1)
"""Hash seeds that most likely apply to overlays of a generation whose files are removed."""


@dataclass(frozen=True, slots=True)
class ErasureStatus:
    """Erasure and the holders of its entity, each with a text on its expected removal."""

    erasure: Erasure
    holders_and_removals: tuple[tuple[EntityHolder, str], ...] = ()

    @property
    def state(self) -> str:
        """State of the erasure: pending, done or forgotten."""
        if not self.erasure.is_in_force:
            return "forgotten"
        return "pending" if self.erasure.is_pending else "done"


def begin_erasing(
    store: ArtefactStore, entity_id: bytes, entity_kind: EntityKind, *, requested_at: float
) -> tuple[Erasure, bool]:
    """Block the entity, then record the request; safe to repeat. Return the erasure, and whether it is new.

    Blocking comes first, since many erasures may have to be read before one can be written.
    """
    was_blocked = entity_kind == "item" and entity_id in latest_blocklist(store).items
    _block(store, [(entity_id, entity_kind)])
    existing_erasures = all_erasures(store, accepts_lost=True)
    erasure = request_erasure(
        store,
        entity_id,
        entity_kind,
        requested_at=requested_at,
        was_blocked=was_blocked,
        existing_erasures=existing_erasures,
    )
    # Until the erasure was written, an unblock was not refused, so block again.
    block_erased(store, [erasure])
    return erasure, find_erasure(existing_erasures, entity_id, entity_kind) is None


def block_erased(store: ArtefactStore, erasures: Iterable[Erasure]) -> None:
    """Block all entities with an erasure in force again, in case one was unblocked."""
    _block(store, [(erasure.raw_id, erasure.kind) for erasure in erasures if erasure.is_in_force])


def _block(store: ArtefactStore, ids_and_kinds: Sequence[tuple[bytes, EntityKind]]) -> None:
    if ids_and_kinds:
        change_blocklist(
            store,
            block_users=[entity_id for entity_id, entity_kind in ids_and_kinds if entity_kind == "user"],
            erase_items=[entity_id for entity_id, entity_kind in ids_and_kinds if entity_kind == "item"],
        )


def readmit_entity(
    store: ArtefactStore, entity_id: bytes, entity_kind: EntityKind, *, forgotten_at: float, reason: str
) -> Erasure:
    """Re-admit an erased entity to later nights and to answers; raise Conflict if it is not erased."""
    reason = demand_reason("forgetting an erasure", reason)
    erasure = find_erasure(all_erasures(store), entity_id, entity_kind)
    if erasure is None:
        raise Conflict(f"{entity_kind} {entity_id.decode()!r} is not erased, so there is nothing to forget")
    mark_forgotten(store, erasure, forgotten_at=forgotten_at, reason=reason)
    if entity_kind == "user":
        change_blocklist(store, unblock_users=[entity_id])
    else:
        change_blocklist(store, unblock_items=() if erasure.was_blocked else [entity_id], readmit_items=[entity_id])
    return erasure


def drop_overlays(config: NightConfig, store: ArtefactStore, control: Control, erasures: Sequence[Erasure]) -> int:
    """Unlink every overlay under the ids of these entities, in all generations of the registry; return the number.

    Overlays with newer events have a digest as key, which does not tell the user: they expire, and the blocklist keeps
    them from being served until then.
    """
    overlay_keys = [
        overlay_key
        for generation in sorted(control.rows())
        for overlay_key in _overlay_keys(config, store, generation, erasures)
    ]
    batches = [
        overlay_keys[batch_start : batch_start + UNLINK_BATCH_KEYS]
        for batch_start in range(0, len(overlay_keys), UNLINK_BATCH_KEYS)
    ]
    return sum(int(control.client.unlink(*batch)) for batch in batches)


def drop_from_sketches(config: NightConfig, store: ArtefactStore, control: Control, erasures: Sequence[Erasure]) -> int:
    """Remove these entities from the sketches of requests; return the number of entries."""
    table_names = set(config.tables)
    for generation in sorted(control.rows()):
        with contextlib.suppress(LarderError):  # the generation's files are removed
            table_names |= set(read_manifest(store, generation).tables)
    sketch_members = [
        sketch_member_of((table, erasure.raw_id)) for erasure in erasures for table in sorted(table_names)
    ]
    batches = [
        sketch_members[batch_start : batch_start + UNLINK_BATCH_KEYS]
        for batch_start in range(0, len(sketch_members), UNLINK_BATCH_KEYS)
    ]
    keys, read_at = config.keyspace(), control.time()
    sketch_keys = [
        key_of(key_number)
        for window, key_of in ((HOT_WINDOW, keys.hot_names), (COLD_WINDOW, keys.cold_names))
        for key_number in _sketch_key_numbers(window, read_at)
    ]
    return sum(int(control.client.zrem(sketch_key, *batch)) for batch in batches for sketch_key in sketch_keys)


def _sketch_key_numbers(window: Window, read_at: float) -> range:
    """Return the numbers of a sketch's keys that may exist; a replica's clock may be slightly ahead of Redis'."""
    window_number = window_number_of(read_at, window)
    return range(window_number - window.sketch_life_s // window.covered_seconds, window_number + 2)


def _overlay_keys(config: NightConfig, store: ArtefactStore, generation: str, erasures: Sequence[Erasure]) -> list[str]:
    manifest: Manifest | None = None
    kinds_by_table: dict[str, tuple[str, ...]]
    try:
        manifest = read_manifest(store, generation)
        kinds_by_table = {table_name: (table_spec.entity,) for table_name, table_spec in manifest.tables.items()}
    except LarderError:
        all_kinds = ("user", "item")
        kinds_by_table = {
            table_name: (ENTITY_BY_TABLE_KIND[table_settings.kind],)
            if table_settings.kind in ENTITY_BY_TABLE_KIND
            else all_kinds
            for table_name, table_settings in config.tables.items()
        }
    keys = config.keyspace()
    return [
        keys.overlay(generation, table, hash_hex(hash_id(erasure.raw_id, seed)))
        for erasure in erasures
        for table, kinds in kinds_by_table.items()
        if erasure.kind in kinds
        for seed in ((manifest.entity_sets[erasure.kind].seed,) if manifest else LIKELY_HASH_SEEDS)
    ]


def settle_erasures(config: NightConfig, releases: Releases, *, in_night: bool = False) -> list[ErasureStatus]:
    """Enforce every erasure in force and mark those that are done; return the status of each, oldest first.

    None is marked while the store has no generation: it may be the wrong store, and no night has left out the entity
    yet.
    """
    store, control = releases.store, releases.control
    erasures = all_erasures(store)
    block_erased(store, erasures)
    pending = [erasure for erasure in erasures if erasure.is_pending]
    if not pending:
        return [ErasureStatus(erasure) for erasure in erasures]
    drop_overlays(config, store, control, pending)
    drop_from_sketches(config, store, control, pending)
    forget_keys(store, [erasure.raw_id for erasure in pending if erasure.kind == "user"])
    forget_events(config, pending, in_night=in_night)
    remove_bundles_with_items(store, [erasure.raw_id for erasure in pending if erasure.kind == "item"])
    # Registry rows are read before files: a night first adds its row, then reads the erasures, then writes files.
    holders_by_number = holders_by_erasure_number(store, pending, control.rows())
    has_generations = bool(store.names("generations"))
    erasures = [
        erasure
        if holders_by_number.get(erasure.number, True) or not has_generations
        else mark_done(store, erasure, done_at=releases.clock())
        for erasure in erasures
    ]
    view, now_s = releases.view(), releases.clock()
    return _erasure_statuses(erasures, holders_by_number, lambda holder: _describe_fate(config, view, holder, now_s))


def settle_erasures_in_night(
    config: NightConfig, releases: Releases, needed_generations: Collection[str]
) -> dict[str, int]:
    """Settle all erasures, and sweep notes of removed generations; return `erasures_pending` for the report."""
    sweep_left_out_notes(releases.store, needed_generations)
    pending = sum(status.state == "pending" for status in settle_erasures(config, releases, in_night=True))
    return {"erasures_pending": pending}


def statuses_without_redis(store: ArtefactStore) -> list[ErasureStatus]:
    """Return the status of every erasure as far as the store shows it, oldest first."""
    erasures, now_s = all_erasures(store), time.time()
    holders_by_number = holders_by_erasure_number(store, [erasure for erasure in erasures if erasure.is_pending], {})
    return _erasure_statuses(
        erasures, holders_by_number, lambda holder: _describe_copy_fate(holder, now_s) if holder.is_copy else ""
    )


def _erasure_statuses(
    erasures: Iterable[Erasure],
    holders_by_number: Mapping[int, Sequence[EntityHolder]],
    describe_fate: Callable[[EntityHolder], str],
) -> list[ErasureStatus]:
    return [
        ErasureStatus(
            erasure, tuple((holder, describe_fate(holder)) for holder in holders_by_number.get(erasure.number, ()))
        )
        for erasure in erasures
    ]


def _describe_fate(config: NightConfig, view: ReleaseView, holder: EntityHolder, now_s: float) -> str:
    """Describe when a holder of an entity may be swept."""
    generation, ledger = holder.generation, view.ledger
    if holder.is_copy:
        return _describe_copy_fate(holder, now_s)
    if ledger.is_pinned(generation, now_s):
        expires_at = (ledger.pin_expiry_by_generation or {}).get(generation)
        until_text = "unpinned" if expires_at is None else f"{datetime.fromtimestamp(expires_at, UTC):%Y-%m-%d}"
        return f"pinned until {until_text}"
    state = view.state(generation)
    if state is GenerationState.LIVE:
        return f"live, swept after it was superseded and {retained_count(config.keep)} newer generations have followed"
    if state is GenerationState.SUPERSEDED:
        return (
            f"superseded, swept once it is not among the newest {retained_count(config.keep)} and no replica holds it"
        )
    if state is None or state in UNFINISHED_STATES:
        hours = config.abandon_after_s / 3600
        return f"{state or 'begun'}, swept if older than the live one and unchanged for {hours:.0f} h"
    return f"{state}, swept by the next retire that finds no replica holding it"


def _describe_copy_fate(holder: EntityHolder, now_s: float) -> str:
    hours = max(0.0, now_s - holder.copied_at) / 3600
    age = "" if not holder.copied_at else f" for {hours / 24:.0f} days" if hours > 48 else f" for {hours:.0f} h"
    return f"copied there{age}, swept by the next step or service on that host"
