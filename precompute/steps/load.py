"""Step `load`: streams a generation's pages into Redis, if Redis has room for them."""

import time
from typing import Any, NotRequired, TypedDict

from cache.control.control_keys import Control
from cache.control.states import GenerationState, demand_allowed
from cache.format.manifest import Manifest
from precompute.builds.build import Build, record_step_time, with_host_copies
from precompute.builds.reports import LOAD_REPORT, BuildId, LoadReport
from precompute.builds.seal import write_manifest
from precompute.bulk.governor import open_governor
from precompute.bulk.headroom import demand_redis_room, redis_page_bytes, time_limit_remark
from precompute.bulk.load import count_loaded_pages, load_part, parts_of, total_bytes
from precompute.config.progress import Progress, quiet, size_text
from precompute.config.settings import NightConfig
from precompute.features import fact_functions
from precompute.releases.release_log import open_releases
from precompute.releases.sweep import note_loaded, sweep
from precompute.steps.night import Night, StepRow


class LoadResult(TypedDict):
    """Result of the step: bytes of all pages, and of those streamed; `remark` on a short time limit."""

    generation: str
    bytes: int
    loaded_bytes: int
    seconds: float
    remark: NotRequired[str]


@with_host_copies
def run(config: NightConfig, build: BuildId, *, progress: Progress = quiet) -> LoadResult:
    """Stream all missing pages into Redis; raise Refused if Redis has too little room."""
    generation_build, started = Build.of(config, build), time.perf_counter()
    manifest = write_manifest(generation_build, fact_functions())
    for artefact in manifest.page_artefacts():
        generation_build.fetch(artefact.path)
    size_bytes, loaded_bytes = total_bytes(manifest), 0
    with record_step_time(generation_build, "load"), open_releases(config) as releases:
        control = releases.control
        state = releases.state(generation_build.generation)
        if state not in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            demand_allowed("load", generation_build.generation, state)
            control.check_eviction_policy()
            sweep(
                config, releases, attempt=generation_build.generation, generation_being_made=generation_build.generation
            )
            _demand_redis_room(generation_build, manifest, control)
            if state is None:
                releases.note(generation_build.generation, GenerationState.BEGUN)
        done_bytes = 0

        def advance(more_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += more_bytes
            progress("load pages", done_bytes, size_bytes)

        with open_governor(config.governor, control) as governor:
            for part in parts_of(manifest):
                if not load_part(
                    control.client, control.keyspace, manifest, generation_build.root, part,
                    chunk_bytes=config.load_chunk_bytes, progress=advance, governor=governor,
                ):  # fmt: skip
                    advance(part.pages.file.size_bytes)
                else:
                    loaded_bytes += part.pages.file.size_bytes
            if state in (None, GenerationState.BEGUN):
                note_loaded(releases, generation_build.generation, governor=governor)
    seconds = time.perf_counter() - started
    # Written even if no page was missing: an earlier attempt may have been killed before it wrote the report.
    if generation_build.read_report(LOAD_REPORT) is None:
        generation_build.report(LOAD_REPORT, LoadReport(seconds=seconds))
    result: LoadResult = {
        "generation": generation_build.generation,
        "bytes": size_bytes,
        "loaded_bytes": loaded_bytes,
        "seconds": round(seconds, 3),
    }
    if remark := time_limit_remark(config, size_bytes):
        result["remark"] = remark
    return result


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    result = run(night.config, night.build, progress=night.progress)
    loaded_bytes, size_bytes = result["loaded_bytes"], result["bytes"]
    summary = "all pages" if loaded_bytes == size_bytes else f"{size_text(loaded_bytes)} loaded, the rest was there"
    remark_line = f"\nnote: {remark}" if (remark := result.get("remark")) else ""
    return StepRow(result, f"{summary}{remark_line}", loaded_bytes, "B", size_bytes)


def _demand_redis_room(build: Build, manifest: Manifest, control: Control) -> None:
    mark_by_part: Any = control.client.hgetall(control.keyspace.loaded_parts(build.generation))
    missing_bytes = 0
    for part in parts_of(manifest):
        if mark_by_part.get(part.loaded_field.encode()) != part.loaded_digest:
            loaded_page_count = count_loaded_pages(control.client, control.keyspace, manifest, part)
            missing_bytes += sum(part.page_size_bytes(page) for page in range(loaded_page_count, part.pages.pages))
    if missing_bytes:
        demand_redis_room(
            control, build.generation, missing_bytes,
            pages_bytes=redis_page_bytes(build.store, control, left_out_generation=build.generation),
            record_bytes=max(table.layout.size_bytes for table in manifest.stored_tables.values()),
        )  # fmt: skip
