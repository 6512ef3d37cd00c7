"""Loading a generation: its pages into Redis, if Redis has room for them."""

import time
from collections.abc import Mapping
from typing import Any

from cache.artefacts import generation_path
from cache.errors import (
    Refused,
)
from cache.manifest import (
    Manifest,
)
from precompute.build import (
    Build,
    Progress,
    Step,
    quiet,
)
from precompute.config import NightConfig
from precompute.control import Control
from precompute.load import load_part, parts_of, total_bytes
from precompute.registry import open_releases
from precompute.sealing import seal
from precompute.states import State, demand

HEADROOM = 0.95


def load(config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet) -> Step:
    """Stream all pages into Redis; parts that are there stay. Refused before Redis would run full."""
    made, started = Build.of(config, build), time.perf_counter()
    manifest = seal(made)
    for artefact in manifest.pages():
        made.fetch(artefact.path)
    size_bytes, loaded = total_bytes(manifest), 0
    with open_releases(config) as releases:
        control, keys = releases.control, config.keyspace()
        state = releases.state(made.generation)
        if state not in (State.LIVE, State.SUPERSEDED):
            demand("load", made.generation, state)
            control.check_policy()
            _check_headroom(made, control, size_bytes)
            if state is None:
                releases.note(made.generation, State.BEGUN)
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            progress("load pages", done, size_bytes)

        for part in parts_of(manifest):
            if not load_part(
                control.client, keys, manifest, made.root, part,
                chunk_bytes=config.load_chunk_bytes, progress=advance,
            ):  # fmt: skip
                advance(part.pages.file.size_bytes)
            else:
                loaded += part.pages.file.size_bytes
        if state in (None, State.BEGUN):
            releases.note(made.generation, State.LOADED)
    seconds = time.perf_counter() - started
    return {
        "generation": made.generation,
        "bytes": size_bytes,
        "loaded_bytes": loaded,
        "seconds": round(seconds, 3),
    }


def _check_headroom(made: Build, control: Control, size_bytes: int) -> None:
    info: Any = control.client.info("memory")
    limit, used = int(info.get("maxmemory", 0)), int(info["used_memory"])
    marked: Any = control.client.hlen(control.keys.loaded(made.generation))
    if not limit or marked:
        return
    keyspace: Any = control.client.info("keyspace")
    expiring = any(each["expires"] for each in keyspace.values())
    if expiring and control.check_policy().startswith("volatile-"):
        # Overlays make way for pages: what stays is Redis' own overhead and the pages of every generation.
        overhead = int(info.get("used_memory_overhead", used))
        used = min(used, overhead + _pages_bytes(made, control))
    if used + size_bytes > HEADROOM * limit:
        raise Refused(
            f"loading {made.generation} needs {size_bytes:,} bytes beside {used:,} in use, more than "
            f"{HEADROOM:.0%} of Redis' maxmemory {limit:,}; raise it or retire generations",
            rule="redis_headroom",
            value=used + size_bytes,
            threshold=int(HEADROOM * limit),
        )


def _pages_bytes(made: Build, control: Control) -> int:
    """Payload of all other generations of which Redis may hold pages."""
    total = 0
    for generation, row in control.rows().items():
        if generation != made.generation and row.state is not State.RETIRED:
            raw = made.store.read(generation_path(generation, "manifest.json"))
            total += 0 if raw is None else total_bytes(Manifest.from_bytes(raw))
    return total
