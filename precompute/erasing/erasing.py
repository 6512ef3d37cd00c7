"""Erasing an entity: blocked at once, overlays dropped, left out from the next night on, done when nothing holds it."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cache.control.hot_keys import COLD, HOT, Window, hour_of, member
from cache.errors import Conflict, LarderError
from cache.format.ids import hash_id
from cache.format.manifest import EntityKind, Manifest
from cache.format.redis_keys import hash_hex
from cache.store.artefacts import ArtefactStore, read_manifest
from cache.store.blocklist import change_blocklist, latest_blocklist
from precompute.builds.tables import ENTITIES
from precompute.bundles.bundle_store import forget_items
from precompute.config.generations_at_peak import retained
from precompute.config.settings import NightConfig
from precompute.config.validation import demand_reason
from precompute.control.control_keys import Control
from precompute.control.states import UNFINISHED, State
from precompute.erasing.holders import holders
from precompute.erasures.erasure import (
    Erasure,
    all_erasures,
    find_erasure,
    mark_done,
    mark_forgotten,
    request,
)
from precompute.erasures.host_records import EntityHolder
from precompute.events.forgetting import forget_events
from precompute.experiments.exposures import forget_keys
from precompute.releases.release_log import ReleaseLog, ReleaseView

UNLINK_BATCH = 256
SEEDS = (0, 1)
"""Hash seeds that were most likely used for the overlays of a generation whose files are gone."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Erasure and what still holds its entity, with when each of these may go."""

    erasure: Erasure
    held: tuple[tuple[EntityHolder, str], ...] = ()

    @property
    def word(self) -> str:
        """Word for the erasure's state: pending, done or forgotten."""
        if not self.erasure.is_in_force:
            return "forgotten"
        return "pending" if self.erasure.is_pending else "done"


def begin_erasing(
    store: ArtefactStore, raw: bytes, kind: EntityKind, *, at: float
) -> tuple[Erasure, bool]:
    """Block, then write the request down; safe to repeat. The erasure, and whether it is new.

    Blocked first, however many erasures have to be read to write one more.
    """
    was_blocked = kind == "item" and raw in latest_blocklist(store).items
    _block(store, [(raw, kind)])
    known = all_erasures(store)
    erasure = request(store, raw, kind, at=at, was_blocked=was_blocked, known=known)
    # Until it was written down, whoever unblocks was not stopped by it.
    block_erased(store, [erasure])
    return erasure, find_erasure(known, raw, kind) is None


def block_erased(store: ArtefactStore, erasures: Iterable[Erasure]) -> None:
    """Blocks the erased entities again, whatever was unblocked meanwhile."""
    _block(store, [(each.raw, each.kind) for each in erasures if each.is_in_force])


def _block(store: ArtefactStore, entities: Sequence[tuple[bytes, EntityKind]]) -> None:
    if entities:
        change_blocklist(
            store,
            block_users=[raw for raw, kind in entities if kind == "user"],
            block_items=[raw for raw, kind in entities if kind == "item"],
        )


def forget(
    store: ArtefactStore, raw: bytes, kind: EntityKind, *, at: float, reason: str
) -> Erasure:
    """Re-admit an erased entity to later nights and to answers; raises Conflict when it is not erased."""
    reason = demand_reason("forgetting an erasure", reason)
    erasure = find_erasure(all_erasures(store), raw, kind)
    if erasure is None:
        raise Conflict(f"{kind} {raw.decode()!r} is not erased, so there is nothing to forget")
    mark_forgotten(store, erasure, at=at, reason=reason)
    if kind == "user":
        change_blocklist(store, unblock_users=[raw])
    elif not erasure.was_blocked:
        change_blocklist(store, unblock_items=[raw])
    return erasure


def drop_overlays(
    config: NightConfig, store: ArtefactStore, control: Control, erasures: Sequence[Erasure]
) -> int:
    """Unlink every overlay under the ids of these entities, in all generations the registry knows; how many there were.

    Those that count newer events lie under a digest that names nobody: they expire, and are not served meanwhile.
    """
    names = [
        name
        for generation in sorted(control.rows())
        for name in _overlay_keys(config, store, generation, erasures)
    ]
    batches = [names[at : at + UNLINK_BATCH] for at in range(0, len(names), UNLINK_BATCH)]
    return sum(int(control.client.unlink(*batch)) for batch in batches)


def drop_hot(
    config: NightConfig, store: ArtefactStore, control: Control, erasures: Sequence[Erasure]
) -> int:
    """Take these entities out of the sketches of requests; how often they stood there."""
    tables = set(config.tables)
    for generation in sorted(control.rows()):
        with contextlib.suppress(LarderError):  # its files are gone
            tables |= set(read_manifest(store, generation).tables)
    members = [member((table, each.raw)) for each in erasures for table in sorted(tables)]
    batches = [members[at : at + UNLINK_BATCH] for at in range(0, len(members), UNLINK_BATCH)]
    keys, at = config.keyspace(), control.time()
    names = [
        name(each)
        for window, name in ((HOT, keys.hot), (COLD, keys.cold))
        for each in _numbers(window, at)
    ]
    return sum(int(control.client.zrem(name, *batch)) for batch in batches for name in names)


def _numbers(window: Window, at: float) -> range:
    """Numbers of all keys of a sketch that can still exist; a replica's idea of Redis' clock may be a little ahead."""
    now = hour_of(at, window)
    return range(now - window.life_s // window.seconds, now + 2)


def _overlay_keys(
    config: NightConfig, store: ArtefactStore, generation: str, erasures: Sequence[Erasure]
) -> list[str]:
    manifest: Manifest | None = None
    tables: dict[str, tuple[str, ...]]
    try:
        manifest = read_manifest(store, generation)
        tables = {name: (each.entity,) for name, each in manifest.tables.items()}
    except LarderError:
        both = ("user", "item")
        tables = {
            name: (ENTITIES[each.kind],) if each.kind in ENTITIES else both
            for name, each in config.tables.items()
        }
    keys = config.keyspace()
    return [
        keys.overlay(generation, table, hash_hex(hash_id(erasure.raw, seed)))
        for erasure in erasures
        for table, kinds in tables.items()
        if erasure.kind in kinds
        for seed in ((manifest.entity_sets[erasure.kind].seed,) if manifest else SEEDS)
    ]


def settle(config: NightConfig, releases: ReleaseLog) -> list[Standing]:
    """Hold every erasure in force to its word and mark the done ones; how each now stands, oldest first."""
    store, control = releases.store, releases.control
    erasures = all_erasures(store)
    block_erased(store, erasures)
    pending = [each for each in erasures if each.is_pending]
    if not pending:
        return [Standing(each) for each in erasures]
    drop_overlays(config, store, control, pending)
    drop_hot(config, store, control, pending)
    forget_keys(store, [each.raw for each in pending if each.kind == "user"])
    forget_events(config, pending)
    forget_items(store, [each.raw for each in pending if each.kind == "item"])
    # Rows before files: a night notes itself before it looks for erasures, and writes files after.
    held = holders(store, pending, control.rows())
    erasures = [
        each if held.get(each.number, True) else mark_done(store, each, at=releases.clock())
        for each in erasures
    ]
    view, now = releases.view(), releases.clock()
    return _standings(erasures, held, lambda found: _fate(config, view, found, now))


def look_without_redis(store: ArtefactStore) -> list[Standing]:
    """Standing of every erasure as far as the store alone can tell, oldest first."""
    erasures, now = all_erasures(store), time.time()
    held = holders(store, [each for each in erasures if each.is_pending], {})
    return _standings(
        erasures, held, lambda found: _fate_of_copy(found, now) if found.is_copy else ""
    )


def _standings(
    erasures: Iterable[Erasure],
    held: Mapping[int, Sequence[EntityHolder]],
    fate: Callable[[EntityHolder], str],
) -> list[Standing]:
    return [
        Standing(each, tuple((found, fate(found)) for found in held.get(each.number, ())))
        for each in erasures
    ]


def _fate(config: NightConfig, view: ReleaseView, held: EntityHolder, now: float) -> str:
    """Words for when what holds an entity may be swept."""
    generation, ledger = held.generation, view.ledger
    if held.is_copy:
        return _fate_of_copy(held, now)
    if ledger.is_pinned(generation, now):
        until = (ledger.pinned or {}).get(generation)
        when = "unpinned" if until is None else f"{datetime.fromtimestamp(until, UTC):%Y-%m-%d}"
        return f"pinned until {when}"
    state = view.state(generation)
    if state is State.LIVE:
        return (
            f"live, swept once {retained(config.keep)} newer generations have followed the next one"
        )
    if state is State.SUPERSEDED:
        return f"superseded, swept once it is not among the newest {retained(config.keep)} and nobody holds it"
    if state is None or state in UNFINISHED:
        hours = config.abandon_after_s / 3600
        return (
            f"{state or 'begun'}, swept if older than the live one and untouched for {hours:.0f} h"
        )
    return f"{state}, swept by the next retire that finds no replica holding it"


def _fate_of_copy(held: EntityHolder, now: float) -> str:
    hours = max(0.0, now - held.at) / 3600
    age = (
        ""
        if not held.at
        else f" for {hours / 24:.0f} days"
        if hours > 48
        else f" for {hours:.0f} h"
    )
    return f"copied there{age}, swept by the next step or service on that host"
