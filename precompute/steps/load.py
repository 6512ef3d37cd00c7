"""Loading a generation: its pages into Redis, if Redis has room for them."""

import time
from collections.abc import Mapping
from typing import Any

from cache.format.manifest import Manifest
from precompute.builds.build import Build
from precompute.builds.copies import on_this_host
from precompute.builds.night import Night, StepRow, size_text
from precompute.builds.seal import seal
from precompute.builds.step_times import timed
from precompute.builds.sweeping import sweep
from precompute.bulk.floor_time import time_limit_remark
from precompute.bulk.governor import open_governor
from precompute.bulk.headroom import demand_redis, held_bytes
from precompute.bulk.load import load_part, loaded_pages, parts_of, total_bytes
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.control.control_keys import Control
from precompute.control.states import State, demand
from precompute.releases.registry import open_releases
from precompute.releases.sweep import note_loaded


@on_this_host
def run(config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet) -> Step:
    """Stream all pages into Redis; parts that are there stay. Refused before Redis would run full."""
    made, started = Build.of(config, build), time.perf_counter()
    manifest = seal(made)
    for artefact in manifest.pages():
        made.fetch(artefact.path)
    size_bytes, loaded = total_bytes(manifest), 0
    with timed(made, "load"), open_releases(config) as releases:
        control = releases.control
        state = releases.state(made.generation)
        if state not in (State.LIVE, State.SUPERSEDED):
            demand("load", made.generation, state)
            control.check_policy()
            sweep(config, releases, attempt=made.generation, making=made.generation)
            _demand_room(made, manifest, control)
            if state is None:
                releases.note(made.generation, State.BEGUN)
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            progress("load pages", done, size_bytes)

        with open_governor(config.governor, control) as governor:
            for part in parts_of(manifest):
                if not load_part(
                    control.client, control.keys, manifest, made.root, part,
                    chunk_bytes=config.load_chunk_bytes, progress=advance, governor=governor,
                ):  # fmt: skip
                    advance(part.pages.file.size_bytes)
                else:
                    loaded += part.pages.file.size_bytes
            if state in (None, State.BEGUN):
                note_loaded(releases, made.generation, governor=governor)
    seconds = time.perf_counter() - started
    # Also where nothing was left to move: whoever moved it may have been killed before it could say so.
    if made.read_report("load") is None:
        made.report("load", {"seconds": seconds})
    return {
        "generation": made.generation,
        "bytes": size_bytes,
        "loaded_bytes": loaded,
        "seconds": round(seconds, 3),
        **({"remark": remark} if (remark := time_limit_remark(config, size_bytes)) else {}),
    }


def in_night(night: Night) -> StepRow:
    """The step with its row in a night's table."""
    found = run(night.config, night.build, progress=night.progress)
    loaded, size_bytes = int(found["loaded_bytes"]), int(found["bytes"])
    what = "all pages" if loaded == size_bytes else f"{size_text(loaded)} moved, the rest was there"
    told = f"\nnote: {remark}" if (remark := found.get("remark")) else ""
    return StepRow(found, f"{what}{told}", loaded, "B", size_bytes)


def _demand_room(made: Build, manifest: Manifest, control: Control) -> None:
    marks: Any = control.client.hgetall(control.keys.loaded(made.generation))
    todo_bytes = 0
    for part in parts_of(manifest):
        if marks.get(part.name.encode()) != part.mark:
            done = loaded_pages(control.client, control.keys, manifest, part)
            todo_bytes += sum(part.size_of(page) for page in range(done, part.pages.pages))
    if todo_bytes:
        demand_redis(
            control, made.generation, todo_bytes,
            pages_bytes=held_bytes(made.store, control, but=made.generation),
            record_bytes=max(table.layout.size_bytes for table in manifest.stored.values()),
        )  # fmt: skip
