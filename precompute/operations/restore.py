"""A restoration: a lost Redis rebuilt from the artefact store."""

import time

from precompute.bulk.governor import open_governor
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.releases.registry import open_releases
from precompute.releases.restore import forgotten
from precompute.releases.restore import restore as restore_redis


def restore(config: NightConfig, *, attempt: str = "shell", progress: Progress = quiet) -> Step:
    """Rebuild a lost Redis from the artefact store: registry, pages, pointer under a new epoch."""
    started, restored_bytes = time.perf_counter(), 0

    def advance(more: int) -> None:
        nonlocal restored_bytes
        restored_bytes += more
        progress("restore pages", restored_bytes, 0)

    with (
        open_releases(config) as releases,
        open_governor(config.governor, releases.control) as governor,
    ):
        prior_view = releases.view()
        pointer, loaded, size_bytes = restore_redis(
            releases,
            attempt=attempt,
            chunk_bytes=config.load_chunk_bytes,
            overlay_ttl_s=config.overlay_ttl_s,
            progress=advance,
            governor=governor,
        )
        notes = forgotten(releases, prior_view, pointer)
    return {
        "generation": pointer.generation, "epoch": pointer.epoch, "loaded": loaded, "bytes": size_bytes,
        "seconds": round(time.perf_counter() - started, 3), **({"notes": notes} if notes else {}),
    }  # fmt: skip
