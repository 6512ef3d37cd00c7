"""Releases that were live, from the store's records: where a replica starts without Redis, and its previous one."""

import logging
from collections.abc import Callable

from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.store.releases import MOVES, Pointer, all_releases, newest_release
from serving.generations.pointer_rules import as_pointer
from serving.generations.snapshot import Snapshot

log = logging.getLogger(__name__)

Open = Callable[[Pointer, Blocklist], Snapshot]
"""Opens the pointer's generation; slow and blocking, raises when it cannot be loaded."""


def newest_pointer(store: ArtefactStore) -> Pointer | None:
    """The newest completed move; raises LarderError, OSError or ValueError for records that cannot be read."""
    release = newest_release(store)
    return None if release is None else as_pointer(release)


def open_published(
    store: ArtefactStore, open_snapshot: Open, generation: str, blocklist: Blocklist
) -> Snapshot | None:
    """A generation as it was last released; None, said in the log, when it never was or cannot be opened."""
    try:
        made_live = [
            release
            for release in all_releases(store)
            if release.is_done and release.generation == generation and release.action in MOVES
        ]
        if made_live:
            return open_snapshot(as_pointer(made_live[-1]), blocklist)
    except Exception:
        log.warning("the previous generation %s is not here", generation, exc_info=True)
        return None
    log.warning("no release made %s live: it is not held as previous", generation)
    return None
