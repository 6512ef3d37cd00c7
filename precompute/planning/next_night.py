"""Problems of pages, and those for which the next night would fail; it is taken to be as large as the live one."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from cache.config.night import REDIS_HEADROOM_RULE
from cache.control.states import GenerationState
from cache.errors import ConfigError, LarderError, Refused, TierUnavailable
from cache.format.manifest import Manifest
from cache.process.host import disk_free_bytes
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from precompute.bulk.headroom import demand_redis_room, redis_page_bytes
from precompute.bulk.load import total_bytes
from precompute.bulk.reload import is_missing
from precompute.config.settings import NightConfig
from precompute.events.files import demand_all_files
from precompute.releases.release_log import Releases, open_releases
from precompute.releases.sweep import unneeded_generations

_LATER_THAN_ALL: Final = "99991231T235959Z"
"""Cut of a night that replaces every unfinished generation."""


def night_problems(config: NightConfig, redis_url: str | None) -> list[str]:
    """Return the problems of state folder and room for which the next night would fail.

    Without a Redis, or if it cannot be asked, room is not judged. Raises CorruptArtefact for missing files of events.
    """
    if config.events.enabled:
        demand_all_files(config.of_events().store())
    state_folder = config.path(config.state)
    existing_folder = next(ancestor for ancestor in (state_folder, *state_folder.parents) if ancestor.exists())
    if not (existing_folder.is_dir() and os.access(existing_folder, os.W_OK | os.X_OK)):
        return [f"the state folder {state_folder} cannot be written: set `state` (LARDER_STATE), or its permissions"]
    if not redis_url:
        return []
    try:
        with open_releases(replace(config, redis_url=redis_url)) as releases:
            return redis_and_disk_problems(config, releases)
    except (TierUnavailable, ConfigError):  # the check of Redis reports it
        return []


def redis_and_disk_problems(config: NightConfig, releases: Releases) -> list[str]:
    """Return the problems of pages that Redis lost, and of room for a night as large as the live generation.

    Counted as free is what the night removes before it loads: generations that nothing needs.
    """
    view, store = releases.view(), releases.store
    if view.pointer is None:
        return []
    try:
        live_manifest = read_manifest(store, view.pointer.generation)
        removed_manifests = {
            generation: _read_manifest_if_whole(store, generation)
            for generation in unneeded_generations(
                releases,
                kept_generations=config.keep,
                grace_s=config.superseded_grace_s,
                abandon_after_s=config.abandon_after_s,
                generation_being_made=_LATER_THAN_ALL,
            )
        }
    except LarderError:
        return []  # another line names what cannot be read
    removed_page_bytes = sum(
        total_bytes(manifest)
        for generation, manifest in removed_manifests.items()
        if manifest is not None
        and (row := view.registry_rows.get(generation)) is not None
        and row.state is not GenerationState.BEGUN
    )
    pages_problem = _lost_pages_problem(releases, live_manifest.generation)
    redis_problem = _redis_problem(releases, live_manifest, removed_page_bytes)
    disk_problem = _disk_problem(store, live_manifest.generation, list(removed_manifests))
    return [problem for problem in (pages_problem, redis_problem, disk_problem) if problem]


def _read_manifest_if_whole(store: ArtefactStore, generation: str) -> Manifest | None:
    try:
        return read_manifest(store, generation)
    except LarderError:
        return None


def _lost_pages_problem(releases: Releases, live_generation: str) -> str | None:
    if not is_missing(releases.control, releases.store, live_generation):
        return None
    return (
        f"Redis lacks pages of the live generation {live_generation}: the previous night, live inference or defaults "
        "answer for them; run `larder restore`"
    )


def _redis_problem(releases: Releases, live_manifest: Manifest, removed_page_bytes: int) -> str | None:
    control, page_bytes = releases.control, total_bytes(live_manifest)
    try:
        control.check_eviction_policy()
        demand_redis_room(
            control, "the next night", page_bytes - removed_page_bytes,
            pages_bytes=redis_page_bytes(releases.store, control),
            record_bytes=max(table.layout.size_bytes for table in live_manifest.stored_tables.values()),
        )  # fmt: skip
    except Refused as refusal:
        if refusal.details["rule"] != REDIS_HEADROOM_RULE:  # an unfit eviction policy
            return refusal.message
        return (
            f"Redis has no room for the next night: with {page_bytes:,} bytes of pages, as many as the live generation "
            f"has, {refusal.details['value']:,} bytes would be in use, and a night is refused beyond "
            f"{refusal.details['threshold']:,} (95 % of maxmemory): raise maxmemory, or unpin generations and end a "
            "canary"
        )
    return None


def _disk_problem(store: ArtefactStore, live_generation: str, removed_generations: list[str]) -> str | None:
    if store.local_folder is None:
        return None
    free_bytes, needed_bytes = disk_free_bytes(store.local_folder), _folder_bytes(store, live_generation)
    if needed_bytes <= free_bytes + sum(_folder_bytes(store, generation) for generation in removed_generations):
        return None
    return (
        f"the disk of the artefact store {store.url} has no room for the next night: {free_bytes:,} bytes are free, "
        f"and the live generation has {needed_bytes:,}: free space, retire generations or move `artifacts`"
    )


def _folder_bytes(store: ArtefactStore, generation: str) -> int:
    """Return the bytes of a generation's files on this host; files with several names count once."""
    size_by_file: dict[tuple[int, int], int] = {}
    for path in Path(store.local(generation_path(generation))).rglob("*"):
        try:
            file_stat = path.lstat()
        except OSError:
            continue  # a running night moved it
        if path.is_file():
            size_by_file[file_stat.st_dev, file_stat.st_ino] = file_stat.st_size
    return sum(size_by_file.values())
