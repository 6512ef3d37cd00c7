"""Leftovers of killed programs and retired generations on this host: unfinished files, copies, half-made bundles."""

from cache.store.artefacts import COPY_IDLE_S
from precompute.bundles.bundle_store import sweep_bundles
from precompute.bundles.bundle_swap import heal, sweep_training
from precompute.config.settings import NightConfig
from precompute.control.states import UNFINISHED
from precompute.erasures.host_records import sweep_notes
from precompute.releases.release_log import ReleaseLog

UNFINISHED_S = 86_400.0
"""Seconds that nothing must have touched an unfinished file before it counts as left over."""


def sweep_leftovers(config: NightConfig, releases: ReleaseLog) -> int:
    """Remove leftovers, by this host's own clock; their number. Nothing readers hold or a night makes is touched."""
    store, now_s, bundle = releases.store, releases.clock(), config.path(config.bundle)
    view = releases.view()
    held_generations = {
        generation
        for replica in releases.control.replicas()
        for generation in replica.held_generations
    }
    needed_generations = {
        generation for generation, row in view.rows.items() if row.state in UNFINISHED
    }
    needed_generations |= {
        *held_generations,
        *filter(None, (view.ledger.live, view.ledger.previous)),
    }
    heal(bundle)
    swept = len(store.sweep_host_copies(needed_generations, cutoff_at=now_s - COPY_IDLE_S))
    sweep_notes(store, needed_generations)
    return (
        swept
        + store.sweep_unfinished(cutoff_at=now_s - UNFINISHED_S)
        + sweep_bundles(store)
        + sweep_training(bundle, changed_before_s=now_s - UNFINISHED_S)
    )
