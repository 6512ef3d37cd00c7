"""Sweep: selection and removal of generations that are no longer needed."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cache.control.control_keys import RegistryRow
from cache.control.states import (
    STATES_BY_ACTION,
    UNFINISHED_STATES,
    GenerationState,
    Ledger,
    demand_allowed,
    fold_releases,
)
from cache.errors import Conflict, UnknownGeneration
from cache.format.manifest import CUT_CHARS, GENERATION_PATTERN, Manifest
from cache.store.artefacts import generation_path, read_manifest
from cache.store.releases import POINTER_ACTIONS, Release
from precompute.bulk.governor import Governor, open_governor
from precompute.bulk.load import UNLINK_BATCH_KEYS, unlink_pages
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig, retained_count
from precompute.releases.release_log import LOOK_TRIES, Releases, ReleaseView

ABANDON_AFTER_S = 86_400.0
MISSED_PAGES_MAX = 256
"""Pages in a row that are not in Redis, after which a table whose number of pages is unknown is taken to have ended."""

ROW_KEPT_S = 2 * 86_400.0
"""Seconds that a row is kept: longer than any step's timeout, so any load that ran during the retirement has ended."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep: generations removed, generations kept because they came into use, Redis keys removed."""

    retired_generations: tuple[str, ...] = ()
    spared_generations: tuple[str, ...] = ()
    removed_key_count: int = 0


def sweep(
    config: NightConfig,
    releases: Releases,
    *,
    attempt: str,
    generation_being_made: str | None = None,
    progress: Progress = quiet,
) -> SweepResult:
    """Retire every unneeded generation; `generation_being_made` replaces older ones that were never published."""
    sweepable_generations = unneeded_generations(
        releases,
        kept_generations=config.keep,
        grace_s=config.superseded_grace_s,
        abandon_after_s=config.abandon_after_s,
        generation_being_made=generation_being_made,
    )
    if not sweepable_generations:
        return SweepResult()
    removed_key_count, spared_ids = 0, []
    with open_governor(config.governor, releases.control) as governor:
        for generation_index, generation in enumerate(sweepable_generations):
            try:
                removed_key_count += retire(
                    releases,
                    generation,
                    attempt=attempt,
                    grace_s=config.superseded_grace_s,
                    abandon_after_s=config.abandon_after_s,
                    generation_being_made=generation_being_made,
                    governor=governor,
                )
            except Conflict:  # pinned, held or live again since it was selected: a later sweep retries
                spared_ids.append(generation)
            progress("retire", generation_index + 1, len(sweepable_generations))
    return SweepResult(
        tuple(
            retired_generation for retired_generation in sweepable_generations if retired_generation not in spared_ids
        ),
        tuple(spared_ids),
        removed_key_count,
    )


def unneeded_generations(
    releases: Releases,
    *,
    kept_generations: int,
    grace_s: float,
    abandon_after_s: float = ABANDON_AFTER_S,
    generation_being_made: str | None = None,
) -> list[str]:
    """Return the unneeded generations: not live, previous, canary, pinned, held by a replica, or just superseded.

    A generation whose time of supersession is in the future counts as just superseded. The newest `kept_generations`
    superseded generations, at least one, are kept for roll backs. Unfinished generations are unneeded once they are
    older than the live one and unchanged for `abandon_after_s`, or at once if `generation_being_made` replaces them.
    """
    view, checked_at = releases.view(), releases.clock()
    ledger = view.ledger
    states, left_epoch_by_id = ledger.state_by_generation, ledger.left_epoch_by_generation
    superseded_ids = [generation_id for generation_id, state in states.items() if state is GenerationState.SUPERSEDED]
    superseded_ids.sort(key=lambda generation_id: left_epoch_by_id.get(generation_id, 0), reverse=True)
    protected_ids = {
        ledger.live_generation,
        ledger.previous_generation,
        *superseded_ids[: retained_count(kept_generations)],
        *_generations_in_use(releases),
    }
    protected_ids.add(generation_being_made)  # it may be a refused generation that is made again
    for canary in (ledger.canary, view.pointer and view.pointer.canary):
        protected_ids |= {canary.generation} if canary is not None else set()
    if view.pointer is not None:
        protected_ids |= {view.pointer.generation, view.pointer.previous}
    stored_ids = {
        generation_id
        for generation_id in releases.store.names("generations")
        if GENERATION_PATTERN.fullmatch(generation_id)
    }
    # A row without files remains of a night that failed at once; the row of a retired generation waits for its overlays
    # to expire.
    registered_ids = {
        generation_id for generation_id, row in view.registry_rows.items() if row.state is not GenerationState.RETIRED
    }
    sweepable_ids = []
    for generation in sorted(stored_ids | registered_ids):
        if generation in protected_ids or ledger.is_pinned(generation, checked_at):
            continue
        if _seconds_since_left(releases, generation, view) < grace_s:
            continue
        if view.state(generation) in STATES_BY_ACTION["retire"] or _is_abandoned(
            releases, view, generation, abandon_after_s, generation_being_made
        ):
            sweepable_ids.append(generation)
    return sweepable_ids


def _seconds_since_left(releases: Releases, generation: str, view: ReleaseView) -> float:
    """Return the seconds since a pointer last named the generation; infinite if it was never live.

    A clock that was ahead and is corrected keeps no generation forever: a later move of the pointer bounds its time.
    """
    left_at = view.ledger.superseded_at_by_generation.get(generation)
    if left_at is None:
        return math.inf
    row = view.registry_rows.get(generation)  # row: written when the pointer moved; record: written before the move
    left_at = max(left_at, left_at if row is None else row.at)
    left_epoch = view.ledger.left_epoch_by_generation.get(generation, 0)
    later_move_times = [
        release.at
        for release in view.history
        if release.is_done and release.action in POINTER_ACTIONS and release.epoch > left_epoch
    ]
    return releases.clock() - min([left_at, *later_move_times])


def _generations_in_use(releases: Releases) -> Collection[str | None]:
    replicas = releases.control.replicas()
    return {
        generation_id
        for replica in replicas
        for generation_id in (*replica.held_generations, *replica.ready_generations, replica.served_generation)
    }


def _is_abandoned(
    releases: Releases,
    view: ReleaseView,
    generation: str,
    abandon_after_s: float,
    generation_being_made: str | None = None,
) -> bool:
    row, live = view.registry_rows.get(generation), view.ledger.live_generation
    if view.state(generation) not in (None, *UNFINISHED_STATES):
        return False
    if generation_being_made is not None and generation[:CUT_CHARS] < generation_being_made[:CUT_CHARS]:
        return True  # newer data replaces it, as nights run one at a time
    if live is None or generation[:CUT_CHARS] >= live[:CUT_CHARS]:
        return False  # it can still be published
    if row is not None:
        return releases.clock() - row.at > abandon_after_s
    try:
        touched_at = float(read_manifest(releases.store, generation).created_at)
    except UnknownGeneration:
        # Its age is unknown, so it counts from now.
        releases.control.write_rows(
            {generation: RegistryRow(GenerationState.BEGUN, releases.clock())}, expected_epoch=view.epoch
        )
        return False
    return releases.clock() - touched_at > abandon_after_s


def retire(
    releases: Releases,
    generation: str,
    *,
    attempt: str,
    grace_s: float = 0.0,
    abandon_after_s: float = ABANDON_AFTER_S,
    generation_being_made: str | None = None,
    governor: Governor | None = None,
) -> int:
    """Remove a generation's pages, then its files; return the number of Redis keys. Safe to repeat after a crash.

    The retirement is marked and recorded first: from then on no roll back can make the generation live.
    """
    _mark_retired(
        releases, generation, attempt=attempt, grace_s=grace_s, abandon_after_s=abandon_after_s,
        generation_being_made=generation_being_made,
    )  # fmt: skip
    manifest = _manifest_if_stored(releases, generation)
    if manifest is None:
        removed_key_count = unlink_recorded(releases, generation, releases.history(), governor=governor)
    else:
        control = releases.control
        removed_key_count = unlink_pages(control.client, control.keyspace, manifest, governor=governor)
    releases.store.delete(generation_path(generation))
    return removed_key_count


def unlink_recorded(
    releases: Releases, generation: str, history: Sequence[Release], *, governor: Governor | None = None
) -> int:
    """Remove the pages that a generation's retirement recorded; return the number of keys.

    Pages loaded again since are removed too, and those of a generation without a record, whose store was replaced by an
    older copy. With readers around, pages are removed one at a time, each paced like a whole piece, since their sizes
    are unknown.
    """
    keys, client = releases.control.keyspace, releases.control.client
    page_count_by_table = _recorded_page_counts(generation, history) or _unrecorded_page_counts(releases, generation)
    page_keys = (
        keys.page(generation, table, page)
        for table in page_count_by_table
        for page in range(page_count_by_table[table])
    )
    removed_key_count = 0
    while True:
        piece_bytes = None if governor is None else governor.piece_bytes
        key_batch = list(islice(page_keys, UNLINK_BATCH_KEYS if piece_bytes is None else 1))
        if not key_batch:
            break
        if governor is not None and piece_bytes is not None:
            governor.pace(piece_bytes)
        removed_key_count += int(client.unlink(*key_batch))
    return removed_key_count + int(client.unlink(keys.loaded_parts(generation)))


def note_loaded(releases: Releases, generation: str, *, governor: Governor | None = None) -> None:
    """Record in the registry that a generation is loaded; raise Conflict if it was retired meanwhile.

    In that case its pages are removed again, since the retirement may have ended before they were loaded.
    """
    try:
        releases.note(generation, GenerationState.LOADED)
    except Conflict:
        unlink_if_retired(releases, generation, governor=governor)
        raise


def unlink_if_retired(releases: Releases, generation: str, *, governor: Governor | None = None) -> None:
    """Remove pages that were loaded into Redis during or after their generation's retirement."""
    view = releases.view()
    if view.state(generation) is GenerationState.RETIRED:
        unlink_recorded(releases, generation, view.history, governor=governor)


def has_pages_again(releases: Releases, generation: str, history: Sequence[Release]) -> bool:
    """True if Redis has the first or last page of any table of a retired generation, or the loaded marks, again."""
    keys, client = releases.control.keyspace, releases.control.client
    end_page_keys = [
        keys.page(generation, table, page)
        for table, page_count in _recorded_page_counts(generation, history).items()
        if page_count
        for page in (0, page_count - 1)
    ]
    return bool(client.exists(keys.loaded_parts(generation))) or any(
        client.strlen(page_key) for page_key in end_page_keys
    )


def _unrecorded_page_counts(releases: Releases, generation: str) -> dict[str, int]:
    """Return the number of pages in Redis of each table that the generation's loaded marks name.

    A table is taken to have ended where MISSED_PAGES_MAX pages in a row are not there.
    """
    keys, client = releases.control.keyspace, releases.control.client
    loaded_fields: Any = client.hgetall(keys.loaded_parts(generation))
    page_count_by_table = {}
    for table in {loaded_field.decode(errors="replace").partition("/")[0] for loaded_field in loaded_fields}:
        page = page_count_by_table[table] = 0
        while page < page_count_by_table[table] + MISSED_PAGES_MAX:
            page += 1
            if client.exists(keys.page(generation, table, page - 1)):
                page_count_by_table[table] = page
    return page_count_by_table


def _recorded_page_counts(generation: str, history: Sequence[Release]) -> Mapping[str, int]:
    """Return the number of pages per table that a generation's retirement recorded."""
    return next((release.pages for release in history if release.generation == generation and release.pages), {})


def _manifest_if_stored(releases: Releases, generation: str) -> Manifest | None:
    try:
        return read_manifest(releases.store, generation)
    except UnknownGeneration:
        return None


def _mark_retired(
    releases: Releases,
    generation: str,
    *,
    attempt: str,
    grace_s: float,
    abandon_after_s: float,
    generation_being_made: str | None,
) -> None:
    for _ in range(LOOK_TRIES):
        view = releases.view()
        view.demand_agreement()
        former_row = view.registry_rows.get(generation)
        state = view.state(generation)
        is_abandoned = _is_abandoned(releases, view, generation, abandon_after_s, generation_being_made)
        if not is_abandoned:
            demand_allowed("retire", generation, state)
        recorded_state = fold_releases(view.history).state(generation)
        if recorded_state is not GenerationState.RETIRED:
            _demand_unneeded(releases, generation, view.ledger)
            if _seconds_since_left(releases, generation, view) < grace_s:  # live again since `unneeded_generations`
                raise Conflict(
                    f"cannot retire {generation}: readers may have left it less than {grace_s:g} s ago",
                    generation=generation,
                )
        rows = {generation: RegistryRow(GenerationState.RETIRED, releases.clock())}
        if releases.control.write_rows(rows, expected_epoch=view.epoch, unless_named_as="previous"):
            break
    else:
        raise Conflict("the pointer moved during each of several reads; try again")
    if recorded_state is GenerationState.RETIRED:
        return
    try:
        # A pin or a reader may have come between check and mark; none can come after the mark.
        _demand_unneeded(releases, generation, releases.ledger())
    except Conflict:
        if former_row is None:
            releases.control.drop_row(generation)
        else:
            releases.control.set_row(generation, former_row)
        raise
    if is_abandoned:
        demand_allowed("abandon", generation, state)
        releases.record("abandon", generation, attempt=attempt, reason="never published")
    manifest = _manifest_if_stored(releases, generation)
    page_count_by_table = (
        {table.name: table.page_count for table in manifest.stored_tables.values()} if manifest else None
    )
    releases.record("retire", generation, attempt=attempt, page_count_by_table=page_count_by_table)


def _demand_unneeded(releases: Releases, generation: str, ledger: Ledger) -> None:
    if ledger.is_pinned(generation, releases.clock()):
        raise Conflict(f"cannot retire {generation}: it is pinned", generation=generation)
    if generation in _generations_in_use(releases):
        raise Conflict(f"cannot retire {generation}: a replica holds it", generation=generation)


def overlay_life_s_max(releases: Releases, overlay_ttl_s: float) -> float:
    """Return the longest life of an overlay in seconds: the setting, or a replica's own value if that is longer."""
    overlay_ttls_s = [replica.overlay_ttl_s or 0.0 for replica in releases.control.replicas()]
    return max([overlay_ttl_s, *overlay_ttls_s])


def drop_old_rows(
    releases: Releases, *, overlay_ttl_s: float, kept_s: float = ROW_KEPT_S, governor: Governor | None = None
) -> int:
    """Remove rows of retired generations whose last overlay must have expired; return the number of rows.

    Rows are kept for at least `kept_s`: pages that a slow load brings back can be found only by the row.
    """
    row_life_s, checked_at = (max(kept_s, overlay_life_s_max(releases, overlay_ttl_s)), releases.clock())
    rows = releases.control.rows()
    expired_ids = [
        generation_id
        for generation_id, row in rows.items()
        if row.state is GenerationState.RETIRED and checked_at - row.at > row_life_s
    ]
    history = releases.history() if expired_ids else []
    recorded_ledger, stored_ids = (
        fold_releases(history),
        set(releases.store.names("generations")) if expired_ids else set(),
    )
    dropped_count = 0
    for generation in expired_ids:
        if recorded_ledger.state(generation) is not GenerationState.RETIRED and generation in stored_ids:
            continue  # A sweep died after marking it: only the row names its remaining pages and files.
        # A Redis restored from an older snapshot may again have pages that were removed long ago.
        unlink_recorded(releases, generation, history, governor=governor)
        releases.control.drop_row(generation)
        dropped_count += 1
    return dropped_count
