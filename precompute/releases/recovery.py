"""Recovery: roll back to an earlier generation, rebuild of a lost Redis from the store, removal of a stray pointer."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cache.control.control_keys import RegistryRow
from cache.control.states import UNFINISHED_STATES, GenerationState, Ledger, fold_releases
from cache.control.store_problems import missing_records_text, older_store_remarks
from cache.errors import Conflict, CorruptArtefact, LarderError, UnknownGeneration
from cache.format.manifest import GENERATION_PATTERN
from cache.l2.errors import translate_redis_errors
from cache.l2.resp import COUNT_SHAPE, checked_reply
from cache.store.artefacts import generation_path, read_manifest
from cache.store.audit import audited
from cache.store.releases import Pointer, Release, demand_released_manifest, publication_time
from precompute.bulk.governor import Governor, open_governor
from precompute.bulk.load import BytesProgress
from precompute.bulk.reload import is_missing, reload
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.releases import moves
from precompute.releases.release_log import (
    LOOK_TRIES,
    Releases,
    ReleaseView,
    demand_reason,
    ledger_and_rows_after_move,
    open_releases,
    without_retired,
)
from precompute.releases.sweep import has_pages_again, overlay_life_s_max, unlink_recorded

log = logging.getLogger(__name__)


def roll_back(config: NightConfig, *, target_generation: str | None, reason: str, attempt: str) -> dict[str, Any]:
    """Make an earlier generation live again (by default the previous one), then repair its damaged pages.

    Before the move it waits for no replica and reads no page. Since readers have moved by then, pages that cannot be
    repaired are only reported (`unmended`).
    """
    reason = demand_reason("a roll back", reason)
    with open_releases(config) as releases:
        with audited(
            releases.store, "roll_back", ("to "
                f"{target_generation or 'the previous one'}"), actor=config.actor, reason=reason,
            attempt=attempt,
        ) as audit_facts:  # fmt: skip
            moved = moves.roll_back(releases, target_generation=target_generation, reason=reason, attempt=attempt)
            pointer = moved.pointer
            audit_facts |= {"generation": pointer.generation, "changed": moved.has_moved}
        report: dict[str, Any] = {
            "generation": pointer.generation, "epoch": pointer.epoch, "previous": pointer.previous,
            "changed": moved.has_moved, "mended": [],
        }  # fmt: skip
        if moved.has_moved:
            history = releases.history()
            remarks = _describe_ended_canary(history, pointer.epoch) + _describe_ended_overrides(history, pointer.epoch)
            remarks += _describe_left_bundle(config, history, pointer)
            if remarks:
                report["notes"] = remarks
        try:
            with (
                translate_redis_errors(),
                # Readers are just swapping: a slow repair is better than one that delays them.
                open_governor(config.governor, releases.control, keeps_cores_awake=False) as governor,
            ):
                report["mended"] = moves.repair_live(releases, pointer.generation, governor=governor)
        except (LarderError, OSError) as error:
            report["unmended"] = str(error)
            report["next"] = (
                f"readers follow {pointer.generation}, but its pages could not all be read back and repaired: as soon "
                "as they can be, run `larder restore`"
            )
    return report


def _describe_ended_canary(history: Sequence[Release], epoch: int) -> list[str]:
    """Describe the canary that the move of this epoch ended; empty if none was open."""
    canary = fold_releases([release for release in history if release.epoch < epoch]).canary
    if canary is None:
        return []
    canary_text = f"the canary {canary.generation}, which had {canary.percent:g} % of the requests"
    return [f"{canary_text}, has ended with this roll back: to try it again, run `larder canary start`"]


def _describe_ended_overrides(history: Sequence[Release], epoch: int) -> list[str]:
    """Describe overrides that the move of this epoch ended: the next verification needs new ones."""
    overrides_before = fold_releases([release for release in history if release.epoch < epoch]).overrides_by_generation
    overrides_after = fold_releases([release for release in history if release.epoch <= epoch]).overrides_by_generation
    return [
        f"the override of {', '.join(sorted(rules))} for {generation} has ended with this roll back: to publish "
        f"{generation} again, override it again, then verify"
        for generation, rules in sorted(overrides_before.items())
        if generation not in overrides_after
    ]


def _describe_left_bundle(config: NightConfig, history: Sequence[Release], pointer: Pointer) -> list[str]:
    """Return a remark if the next night uses the rolled-back model; empty if it does not, or that is unknown."""
    from precompute.bundles.bundle_store import chosen_bundle_digest  # imported late: pyarrow must not delay the move

    left_id = fold_releases([release for release in history if release.epoch < pointer.epoch]).live_generation
    store, live_id = config.store(), pointer.generation
    try:
        left_manifest, live_manifest = (read_manifest(store, str(left_id)), read_manifest(store, live_id))
        if (
            live_manifest.bundle_digest == left_manifest.bundle_digest
            or chosen_bundle_digest(config) != left_manifest.bundle_digest
        ):
            return []
    except (LarderError, OSError):  # the move is done: a missing remark must not fail it
        return []
    bundle_path = generation_path(live_id, "bundle")
    remedy = f"copy {store.url}/{bundle_path} to this host and run `larder hand-over` with that folder"
    if store.local_folder is not None:
        remedy = f"run `larder hand-over {store.local_folder / bundle_path}`"
    remark = (
        f"the next night uses the model of {left_id} again ({left_manifest.bundle_digest[:12]}): if that model "
        "is why you "
        f"rolled back, {remedy}, which is the model of {live_id}, or import or train the model anew"
    )
    return [remark]


def describe_rolled_back_model(releases: Releases, bundle_digest: str) -> list[str]:
    """Return a remark if a night's model is that of a rolled-back generation and not of the live one."""
    history = releases.history()
    ledger = fold_releases(history)
    rolled_back_ids = [
        generation for generation, state in ledger.state_by_generation.items() if state is GenerationState.ROLLED_BACK
    ]
    for generation in sorted(rolled_back_ids, key=lambda rolled: -ledger.left_epoch_by_generation.get(rolled, 0)):
        try:
            bundle_digests = {
                read_manifest(releases.store, compared_id).bundle_digest
                for compared_id in (generation, ledger.live_generation)
                if compared_id is not None
            }
            if read_manifest(releases.store, generation).bundle_digest != bundle_digest:
                continue
        except LarderError:  # retired or unreadable, so its model is unknown
            continue
        if len(bundle_digests) > 1:
            left_epoch = ledger.left_epoch_by_generation.get(generation)
            reason = next((release.reason for release in history if release.epoch == left_epoch), "")
            return [f"uses the model of {generation}, which was rolled back: {reason}"]
    return []


def restore(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> dict[str, Any]:
    """Rebuild a lost Redis from the artefact store: registry, pages, pointer with a new epoch."""
    started_s, restored_bytes = time.perf_counter(), 0

    def advance(more_bytes: int) -> None:
        nonlocal restored_bytes
        restored_bytes += more_bytes
        progress("restore pages", restored_bytes, 0)

    with open_releases(config) as releases, open_governor(config.governor, releases.control) as governor:
        prior_view = releases.view()
        pointer, loaded_ids, loaded_bytes = restore_redis(
            releases,
            attempt=attempt,
            chunk_bytes=config.load_chunk_bytes,
            overlay_ttl_s=config.overlay_ttl_s,
            progress=advance,
            governor=governor,
        )
        remarks = describe_forgotten_facts(releases, prior_view, pointer)
        remarks += older_store_remarks(releases.store, releases.control.replicas())
    return {
        "generation": pointer.generation, "epoch": pointer.epoch, "loaded": loaded_ids, "bytes": loaded_bytes,
        "seconds": round(time.perf_counter() - started_s, 3), **({"notes": remarks} if remarks else {}),
    }  # fmt: skip


def restore_redis(
    releases: Releases,
    *,
    attempt: str,
    chunk_bytes: int,
    overlay_ttl_s: float = math.inf,
    progress: BytesProgress = lambda _bytes: None,
    governor: Governor | None = None,
) -> tuple[Pointer, list[str], int]:
    """Rebuild a lost Redis: registry, pages of the live and previous generations, pointer with a new epoch.

    Returns the pointer, the restored generations and the bytes loaded. Raises Conflict if nothing was ever published. A
    publish or roll back during the restore is never undone: the restore starts over from the new live generation. If a
    writer died before it was known whether readers saw its move, the pointer gets a new epoch; an unfinished roll back
    is completed. A generation gets no registry row if it was retired so long ago that all its overlays have expired.
    """
    control = releases.control

    def is_urgent(generation: str) -> bool:
        """True for the live generation if its pages are missing: readers wait for it, so loading is not throttled."""
        return generation == restorable_ids[0] and is_missing(control, releases.store, generation)

    for _ in range(LOOK_TRIES):
        view = releases.view()
        ledger = view.ledger
        if ledger.live_generation is None:
            where = "here" if view.history else f"here ({missing_records_text(releases.store)})"
            raise Conflict(f"nothing was ever published {where}, so there is nothing to restore")
        if view.epoch > ledger.live_epoch:
            view.demand_agreement()
        control.check_eviction_policy()
        doubtful_roll_back = _roll_back_in_doubt(view)
        target_ledger = ledger
        if doubtful_roll_back is not None:
            ledger_if_done = fold_releases([*view.history, replace(doubtful_roll_back, is_done=True)])
            target_ledger = without_retired(ledger_if_done, view.registry_rows)
        restorable_ids = _restorable_generations(releases, view, target_ledger)
        # The registry must know a generation before its pages are in Redis.
        if not control.write_rows(_registry_rows(releases, view, overlay_ttl_s), expected_epoch=view.epoch):
            continue
        # A restored older snapshot of Redis may hold pages of retired generations. Generations that are only marked as
        # retired may still have readers.
        for generation_id, state in fold_releases(view.history).state_by_generation.items():
            if state is GenerationState.RETIRED and (
                generation_id in view.registry_rows or has_pages_again(releases, generation_id, view.history)
            ):
                unlink_recorded(releases, generation_id, view.history, governor=governor)
        loaded_bytes = sum(
            reload(
                control,
                releases.store,
                generation_id,
                chunk_bytes=chunk_bytes,
                progress=progress,
                governor=None if is_urgent(generation_id) else governor,
            )
            for generation_id in restorable_ids
        )
        latest_view = releases.view()
        if (latest_view.pointer, latest_view.ledger.live_epoch, latest_view.ledger.state_by_generation) != (
            view.pointer,
            ledger.live_epoch,
            ledger.state_by_generation,
        ):
            continue
        if view.pointer is not None and view.epoch == ledger.live_epoch and not _intents_in_doubt(view):
            return view.pointer, restorable_ids, loaded_bytes
        moved_pointer = _move_pointer(releases, view, restorable_ids, doubtful_roll_back, attempt=attempt)
        if moved_pointer is not None:
            return moved_pointer, restorable_ids, loaded_bytes
    raise Conflict(f"the releases changed {LOOK_TRIES} times while Redis was being restored; try again")


def describe_forgotten_facts(releases: Releases, prior_view: ReleaseView, pointer: Pointer) -> list[str]:
    """Describe facts that were lost with the registry and that no release record holds, with the remedy.

    `prior_view`: the view before the restore; `pointer`: the pointer that the restore wrote.
    """
    remarks = []
    canary = prior_view.ledger.canary
    if canary is not None and pointer.canary is None and pointer.epoch > prior_view.ledger.live_epoch:
        remarks.append(f"the canary of {canary.generation} has ended: verify {canary.generation}, then start it again")
    for generation, row in sorted(releases.control.rows().items()):
        if generation in prior_view.registry_rows or row.state is not GenerationState.BEGUN:
            continue
        try:
            gates = read_manifest(releases.store, generation).gates
        except LarderError:
            continue
        if gates and all(gate["passed"] for gate in gates):
            remarks.append(
                f"{generation} was verified: run `load {generation}` and `verify {generation}` to publish it"
            )
    return remarks


def _intents_in_doubt(view: ReleaseView) -> list[Release]:
    """Return intents of writers that died: they may have moved the pointer before Redis lost it."""
    live_epoch = view.ledger.live_epoch
    return [
        release
        for release in view.history
        if not release.is_done and release.expected == live_epoch and release.epoch > live_epoch
    ]


def _roll_back_in_doubt(view: ReleaseView) -> Release | None:
    """Return the unfinished roll back to complete: readers that followed it must not return to the bad generation."""
    for release in reversed(_intents_in_doubt(view)):
        is_sound = view.ledger.state(release.generation) is GenerationState.SUPERSEDED
        if release.action == "roll_back" and is_sound:
            return release
    return None


def _registry_rows(releases: Releases, view: ReleaseView, overlay_ttl_s: float) -> dict[str, RegistryRow]:
    """Return the registry rows that releases prove, and a row for every unfinished night with files.

    An unfinished night may still load. A row with a later state than the releases prove is kept: its refusal may be
    about to be recorded.
    """
    restored_at, ledger = releases.clock(), view.ledger
    overlay_life_s = overlay_life_s_max(releases, overlay_ttl_s)
    forgotten_ids = {
        release.generation
        for release in view.history
        if release.action == "retire" and restored_at - release.at > overlay_life_s
    }
    stored_ids = {
        generation_id
        for generation_id in releases.store.names("generations")
        if GENERATION_PATTERN.fullmatch(generation_id)
    }
    rows = {
        generation_id: RegistryRow(GenerationState.BEGUN, restored_at, "restored")
        for generation_id in stored_ids - set(view.registry_rows)
    }
    return rows | {
        generation_id: RegistryRow(
            state, ledger.superseded_at_by_generation.get(generation_id, restored_at), "restored"
        )
        for generation_id, state in ledger.state_by_generation.items()
        if (
            generation_id not in view.registry_rows
            and not (state is GenerationState.RETIRED and generation_id in forgotten_ids)
        )
        or (
            generation_id in view.registry_rows
            and view.registry_rows[generation_id].state is not view.state(generation_id)
        )
    }


def _restorable_generations(releases: Releases, view: ReleaseView, target_ledger: Ledger) -> list[str]:
    """Return the live generation, and the previous one if its files match the release."""
    live_id, previous_id = str(target_ledger.live_generation), target_ledger.previous_generation
    try:
        demand_released_manifest(releases.store, live_id, view.history)
    except UnknownGeneration as error:
        raise Conflict(f"the files of {live_id} are gone from {releases.store.url}: run a night") from error
    if previous_id is None:
        return [live_id]
    # A missing previous generation only prevents roll backs, so readers need not wait for it.
    return [live_id, previous_id] if _has_manifest(releases, previous_id, view.history) else [live_id]


def _move_pointer(
    releases: Releases,
    view: ReleaseView,
    restorable_ids: list[str],
    doubtful_roll_back: Release | None,
    *,
    attempt: str,
) -> Pointer | None:
    live_id, previous_id = restorable_ids[0], restorable_ids[1] if len(restorable_ids) > 1 else None
    release = releases.record(
        "restore" if doubtful_roll_back is None else "roll_back",
        live_id,
        attempt=attempt,
        reason="Redis was lost" if doubtful_roll_back is None else doubtful_roll_back.reason,
        previous_generation=previous_id,
        # The live epoch by the records, not only by Redis: it decides later whether this move is in doubt.
        expected_epoch=max(view.epoch, view.ledger.live_epoch),
    )
    history = releases.history()
    if history[-1].stored_number != release.stored_number:
        return None  # a later record's writer may have moved readers, unknown to a Redis lost again
    if fold_releases(history).live_epoch != view.ledger.live_epoch:
        return None  # a move that Redis lost was recorded as done meanwhile
    published_at = publication_time(view.history, live_id) or releases.clock()
    new_pointer = Pointer(live_id, release.epoch, previous_id, attempt, published_at=published_at)
    rows = {live_id: RegistryRow(GenerationState.LIVE, releases.clock())}
    if doubtful_roll_back is not None:
        _, rows = ledger_and_rows_after_move(
            view, "roll_back", live_id, attempt=attempt, moved_at=releases.clock(), reason=doubtful_roll_back.reason
        )
    try:
        moved_pointer = releases.control.move_pointer(
            new_pointer, expected_epoch=view.epoch, row_by_generation=rows, allowed_states=frozenset(GenerationState)
        )
    except Conflict as error:
        if error.details.get("state") == "unknown":
            return None  # the row was written before the pages: Redis was lost again, with both
        raise
    if moved_pointer is not None:
        releases.complete(moved_pointer.epoch)
    return moved_pointer


# Compare and delete: a pointer that changed meanwhile belongs to another writer.
_REMOVE_POINTER_SCRIPT = """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


def adopt(
    config: NightConfig, *, reason: str, attempt: str, accepts_empty: bool = False, progress: Progress = quiet
) -> dict[str, Any]:
    """Remove a stray pointer, then restore the store's live generation, if one was ever published.

    The reason is recorded under an epoch above the stray pointer's, so that readers who saw it follow the next pointer.
    Raises ConfigError without a reason, Conflict if the releases explain the pointer or there is none, and, unless
    `accepts_empty`, for a store without any release record, which may be one that is not mounted.
    """
    reason = demand_reason("adopting a Redis", reason)
    with open_releases(config) as releases:
        keys, client = releases.control.keyspace, releases.control.client
        raw_pointer: Any = client.get(keys.live)
        if raw_pointer is None:
            raise Conflict(f"{keys.live} holds no pointer, so there is nothing to adopt: run `larder restore`")
        if not accepts_empty and not releases.history():
            raise Conflict(
                f"{missing_records_text(releases.store)}: to adopt it would forget every release and erasure that led "
                f"to the pointer in {keys.live}. Mount it, or correct artifacts (LARDER_ARTIFACTS); if it is lost, "
                "start a new namespace (LARDER_NAMESPACE), or accept the loss with --empty"
            )
        stray_pointer = _pointer_if_readable(raw_pointer)
        ledger = releases.ledger() if stray_pointer is not None else fold_releases(releases.history())
        if stray_pointer is not None and stray_pointer.epoch <= ledger.live_epoch:
            raise Conflict(
                f"the releases in {releases.store.url} explain the pointer in {keys.live}: run "
                "`larder restore` without --adopt"
            )
        if ledger.live_generation is not None:
            demand_released_manifest(releases.store, ledger.live_generation, releases.history())
        removed_text = raw_pointer.decode(errors="replace")[:200]
        with audited(
            releases.store, "adopt", f"pointer {keys.live}", actor=config.actor, reason=reason, attempt=attempt
        ) as audit_details:
            audit_details["removed"] = removed_text
            if stray_pointer is not None:
                recorded_generation = (
                    stray_pointer.generation if GENERATION_PATTERN.fullmatch(stray_pointer.generation) else "unknown"
                )
                # This intent is never completed: it only raises the epoch and keeps the reason.
                releases.record(
                    "restore", recorded_generation, attempt=attempt, reason=f"adopted: {reason}",
                    expected_epoch=stray_pointer.epoch,
                )  # fmt: skip
            if not checked_reply("EVAL", client.eval(_REMOVE_POINTER_SCRIPT, 1, keys.live, raw_pointer), COUNT_SHAPE):
                raise Conflict(f"the pointer in {keys.live} changed while it was being checked; try again")
            log.warning("removed pointer %s, reason %s: %.200r", keys.live, reason, raw_pointer)
            _correct_registry_rows(releases, ledger, reason)
    if ledger.live_generation is None:
        return {"removed": removed_text, "generation": None, "next": "run a night: it can publish"}
    return {"removed": removed_text, **restore(config, attempt=attempt, progress=progress)}


def _pointer_if_readable(raw_pointer: bytes) -> Pointer | None:
    try:
        return Pointer.from_bytes(raw_pointer)
    except CorruptArtefact:
        return None


def _correct_registry_rows(releases: Releases, ledger: Ledger, reason: str) -> None:
    """Correct registry rows that the store's releases contradict: the store decides.

    Generations that only Redis has as published become abandoned: they can be made and verified again, or swept. Those
    that only Redis has as retired, and whose manifest the store has, get back the state of the records.
    """
    changed_at, history = releases.clock(), releases.history()
    rows = {}
    for generation, row in releases.control.rows().items():
        proven_state = ledger.state(generation)
        if proven_state is None and row.state not in (*UNFINISHED_STATES, GenerationState.RETIRED):
            rows[generation] = RegistryRow(GenerationState.ABANDONED, changed_at, f"adopted: {reason}")
        elif (
            row.state is GenerationState.RETIRED
            and proven_state not in (None, GenerationState.RETIRED)
            and _has_manifest(releases, generation, history)
        ):
            # `write_rows` leaves retired rows as they are.
            corrected_row = RegistryRow(
                proven_state, ledger.superseded_at_by_generation.get(generation, changed_at), f"adopted: {reason}"
            )
            releases.control.set_row(generation, corrected_row)
    if rows:
        releases.control.write_rows(rows, expected_epoch=0)


def _has_manifest(releases: Releases, generation: str, history: list[Release]) -> bool:
    """True if the store has the manifest that the releases name."""
    try:
        demand_released_manifest(releases.store, generation, history)
    except (UnknownGeneration, CorruptArtefact):
        return False
    return True
