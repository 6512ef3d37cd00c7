"""The sweep as a step of a night takes it: whatever no longer has to be here goes, before room is asked for."""

from dataclasses import dataclass

from cache.errors import Conflict
from precompute.bulk.governor import open_governor
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.releases.release_log import ReleaseLog
from precompute.releases.sweep import retire, sweepable


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Generations removed, those spared because somebody came to need them meanwhile, and Redis keys removed."""

    retired: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    keys: int = 0


def sweep(
    config: NightConfig,
    releases: ReleaseLog,
    *,
    attempt: str,
    making: str | None = None,
    progress: Progress = quiet,
) -> SweepResult:
    """Retire every generation that nobody needs; `making` replaces older ones that were never published."""
    sweepable_generations = sweepable(
        releases,
        keep=config.keep,
        grace_s=config.superseded_grace_s,
        abandon_after_s=config.abandon_after_s,
        making=making,
    )
    if not sweepable_generations:
        return SweepResult()
    removed, spared = 0, []
    with open_governor(config.governor, releases.control) as governor:
        for number, generation in enumerate(sweepable_generations):
            try:
                removed += retire(
                    releases,
                    generation,
                    attempt=attempt,
                    grace_s=config.superseded_grace_s,
                    abandon_after_s=config.abandon_after_s,
                    making=making,
                    governor=governor,
                )
            except Conflict:  # pinned, held or live again since it was looked at: another time
                spared.append(generation)
            progress("retire", number + 1, len(sweepable_generations))
    return SweepResult(
        tuple(
            retired_generation
            for retired_generation in sweepable_generations
            if retired_generation not in spared
        ),
        tuple(spared),
        removed,
    )
