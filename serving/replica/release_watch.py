"""Release records: read once for all of a replica; when each action was taken last, what refused the last night."""

import logging
import threading
from collections.abc import Iterable

from cache.errors import LarderError
from cache.store.artefacts import ArtefactStore, read_manifest
from cache.store.releases import POINTED, Release, all_releases
from serving.generations.store_threads import InThread

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""Stand-in for the gate's name where the verdicts of what was refused cannot be read (yet)."""


class ReleaseWatch:
    """Watch on the release records, aside from the event loop; what cannot be read leaves what is known."""

    def __init__(self, store: ArtefactStore, in_thread: InThread) -> None:
        self.last: dict[str, float] = {}
        self.refused: frozenset[str] = frozenset()
        self._store = store
        self._in_thread = in_thread
        self._release_by_number: dict[int, Release] = {}
        self._reading = threading.Lock()
        self._judged: tuple[int, frozenset[str]] = 0, frozenset()
        self._trouble: str | None = None

    def records(self) -> list[Release]:
        """Every record, oldest first, none read a second time; blocking, for any thread.

        Raises LarderError, OSError or ValueError where they cannot be read.
        """
        with self._reading:
            return all_releases(self._store, self._release_by_number)

    async def refresh(self) -> None:
        """Looks at the records once; new trouble is logged."""
        try:
            self.last, self.refused = await self._in_thread(self._read)
            trouble = None
        except (LarderError, OSError, ValueError) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            log.warning("the release records cannot be read: %s", trouble)
        self._trouble = trouble

    def _read(self) -> tuple[dict[str, float], frozenset[str]]:
        happened = [
            release
            for release in self.records()
            if release.is_done or release.action not in POINTED
        ]
        refusal = open_refusal(happened)
        return {release.action: release.at for release in happened}, self._rules(refusal)

    def _rules(self, refusal: Release | None) -> frozenset[str]:
        if refusal is None:
            return frozenset()
        # A refusal is written before its verdicts are: what cannot be told yet is looked at again.
        if self._judged[0] != refusal.stored_number or UNKNOWN in self._judged[1]:
            try:
                gates = read_manifest(self._store, refusal.generation).gates
            except LarderError:
                gates = ()
            failed = frozenset(str(gate["rule"]) for gate in gates if not gate["passed"])
            self._judged = refusal.stored_number, failed or frozenset({UNKNOWN})
        return self._judged[1]


def open_refusal(happened: Iterable[Release]) -> Release | None:
    """The newest refusal, if since then nothing was published and nobody lifted it or gave its generation up. Pure."""
    refusal: Release | None = None
    for release in happened:
        if release.action == "refuse":
            refusal = release
        elif release.action == "publish":
            refusal = None
        elif release.action in ("verify", "abandon") and refusal is not None:
            refusal = None if release.generation == refusal.generation else refusal
    return refusal
