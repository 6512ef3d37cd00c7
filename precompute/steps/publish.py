"""Publication: the pointer moved, followed, moved back or rebuilt, and what nobody reads removed."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cache.errors import CorruptArtefact, LarderError
from cache.format.directory import Directory
from cache.format.manifest import (
    Manifest,
    Table,
)
from cache.store.artefacts import fetch_checked
from cache.store.releases import Pointer
from precompute.builds.build import Build
from precompute.builds.copies import on_this_host
from precompute.builds.leftovers import sweep_leftovers
from precompute.builds.step_times import timed
from precompute.builds.sweeping import sweep
from precompute.bulk.governor import open_governor
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.config.validation import demand_reason
from precompute.control.control_keys import Control, Replica, connect, translated
from precompute.erasing.erasing import settle
from precompute.releases.registry import open_releases
from precompute.releases.replication import confirm, run_ids
from precompute.releases.restore import forgotten
from precompute.releases.restore import restore as restore_redis
from precompute.releases.staging import Stage, staged
from precompute.releases.sweep import drop_old_rows
from precompute.steps.seal import seal

WARM_POLL_S = 0.1


@on_this_host
def publish(
    config: NightConfig, verified: Mapping[str, Any], *, attempt: str, progress: Progress = quiet
) -> Step:
    """Wait until replicas hold it ready, move the pointer, read it back: success is what a reader can read.

    A record of every table is read back first. Raises Conflict, and nothing is published, when too few replicas
    become ready within `flip.wait_s`, if replicas of Redis lag behind for that long, or when another generation is live
    than the one that `verify` compared with.
    """
    made = Build.of(config, verified)
    manifest = seal(made)
    with (
        timed(made, "publish"),
        open_releases(config) as releases,
        open_governor(config.governor, releases.control) as governor,
    ):
        report = made.read_report("verified") or {}
        moved = releases.prepare(
            made.generation, attempt=attempt, verified=report, governor=governor
        )
        if moved is None:
            for entities in manifest.entity_sets.values():
                for part in entities.parts:
                    fetch_checked(made.store, made.generation, part.file)
            # Before the pointer moves: afterwards it would be too late to find that nothing can be read.
            for table in manifest.tables.values():
                _read_back(made, manifest, table, releases.control)
            # Reading everything back, where a node has started since, takes too long for replicas to stand by.
            wait_s = config.flip.wait_s
            confirm(releases, made.generation, report, timeout_s=wait_s)
            known = {"run_ids": run_ids(releases.control.client)}
            with staged(
                releases.control, made.generation, config.flip, attempt=attempt, progress=progress
            ):
                confirm(releases, made.generation, known, timeout_s=wait_s)
                moved = releases.publish(
                    made.generation, attempt=attempt, verified=report, governor=governor
                )
        else:
            # A publisher killed right after its move left its note: replicas would hold the generation on its behalf.
            Stage(releases.control).clear(attempt, made.generation)
        now = releases.control.pointer()
        if now is None or now.epoch < moved.pointer.epoch:
            raise CorruptArtefact("the pointer that was written cannot be read back")
    return {
        "generation": moved.pointer.generation,
        "epoch": moved.pointer.epoch,
        "previous": moved.pointer.previous,
        "changed": moved.changed,
    }


def _read_back(made: Build, manifest: Manifest, table: Table, control: Control) -> None:
    directory = Directory.open(made.root, manifest.entity_sets[table.entity])
    if not directory.count:
        return
    page, offset = table.locate(*directory.place(directory.count - 1))
    name = control.keys.page(manifest.generation, table.name, page)
    raw: Any = control.client.getrange(name, offset, offset + table.layout.size_bytes - 1)
    if len(raw) != table.layout.size_bytes:
        raise CorruptArtefact(
            f"the last record of {table.name} cannot be read back from Redis", page=name
        )


def warm(config: NightConfig, build: Mapping[str, Any]) -> Step:
    """Wait, up to `warm_timeout_s`, until every live replica answers from the generation; how far apart they swapped.

    `skew_ms`: between the first swap and the last, null below two; `lag_ms`: each one's behind `published_at`.
    """
    generation, started = str(build["generation"]), time.perf_counter()
    with (
        timed(Build.of(config, build), "warm"),
        connect(config.redis_url, config.redis_timeout_s) as client,
    ):
        control = Control(client, config.keyspace())
        while True:
            replicas = control.replicas()
            waiting = [replica.name for replica in replicas if replica.serving != generation]
            seconds = time.perf_counter() - started
            if not waiting or seconds > config.warm_timeout_s:
                return {
                    "generation": generation,
                    "replicas": len(replicas),
                    "waiting": waiting,
                    "seconds": round(seconds, 3),
                    **_flip_of(control.pointer(), replicas),
                }
            time.sleep(WARM_POLL_S)


def _flip_of(pointer: Pointer | None, replicas: Sequence[Replica]) -> Step:
    """Skew and lags (ms) of the replicas there when the pointer moved; one that started later has not flipped."""
    swapped = {
        each.name: each.swapped_at
        for each in replicas
        if pointer is not None and each.epoch == pointer.epoch and each.swapped_at is not None
    }
    times = sorted(swapped.values())
    at = 0.0 if pointer is None else pointer.published_at
    return {
        "skew_ms": round(1000 * (times[-1] - times[0]), 1) if len(times) > 1 else None,
        "lag_ms": {name: round(1000 * (each - at), 1) for name, each in swapped.items()},
    }


def retire(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> Step:
    """Remove what nobody needs any more: pages and files of generations, rows whose overlays are gone, leftovers.

    Then erasures whose last holder went are done.
    """
    with open_releases(config) as releases:
        swept = sweep(config, releases, attempt=attempt, progress=progress)
        releases.control.forget_dead_replicas()
        rows = drop_old_rows(releases, overlay_ttl_s=config.overlay_ttl_s)
        leftovers = sweep_leftovers(config, releases)
        pending = sum(each.word == "pending" for each in settle(config, releases))
    return {
        "retired": list(swept.retired), "spared": list(swept.spared), "keys": swept.keys,
        "rows": rows, "leftovers": leftovers, "erasures_pending": pending,
    }  # fmt: skip


def roll_back(config: NightConfig, *, to: str | None, reason: str, attempt: str) -> Step:
    """Make an earlier generation live again (the previous one unless named), then repair damaged pages of it.

    Waits for no replica and reads no page before the move. What cannot be repaired after it is told as `unmended`:
    readers have moved by then.
    """
    reason = demand_reason("a roll back", reason)
    with open_releases(config) as releases:
        moved = releases.roll_back(to=to, reason=reason, attempt=attempt)
        pointer = moved.pointer
        found: Step = {
            "generation": pointer.generation, "epoch": pointer.epoch, "previous": pointer.previous,
            "changed": moved.changed, "mended": [],
        }  # fmt: skip
        try:
            with (
                translated(),
                # Right beside the flip: going slower is better than being felt.
                open_governor(config.governor, releases.control, awake=False) as governor,
            ):
                found["mended"] = releases.mend(pointer.generation, governor=governor)
        except (LarderError, OSError) as error:
            found["unmended"] = str(error)
            found["next"] = (
                f"readers follow {pointer.generation}, but its pages could not all be read back and repaired: once "
                "that is possible, run `python -m precompute restore`"
            )
    return found


def restore(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> Step:
    """Rebuild a lost Redis from the artefact store: registry, pages, pointer under a new epoch."""
    started, done = time.perf_counter(), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress("restore pages", done, 0)

    with (
        open_releases(config) as releases,
        open_governor(config.governor, releases.control) as governor,
    ):
        before = releases.view()
        pointer, loaded, size_bytes = restore_redis(
            releases,
            config.keyspace(),
            attempt=attempt,
            chunk_bytes=config.load_chunk_bytes,
            overlay_ttl_s=config.overlay_ttl_s,
            progress=advance,
            governor=governor,
        )
        notes = forgotten(releases, before, pointer)
    return {
        "generation": pointer.generation, "epoch": pointer.epoch, "loaded": loaded, "bytes": size_bytes,
        "seconds": round(time.perf_counter() - started, 3), **({"notes": notes} if notes else {}),
    }  # fmt: skip
