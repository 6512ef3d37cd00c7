"""Problems of the artefact store as a replica sees them: pointer, release records, files of generations, free disk."""

import logging
import time
from collections.abc import Callable

from cache.control.store_problems import full_store_problem, generation_files_problems, unexplained_pointer_problem
from cache.errors import CorruptArtefact, LarderError, TierUnavailable, mask_secrets
from cache.l2.control_plane import ControlPlane
from cache.store.artefacts import ArtefactStore
from cache.store.releases import Pointer, all_releases
from serving.generations.nights import ReleaseWatch
from serving.process.resources import StoreThreads

log = logging.getLogger(__name__)

FILES_INTERVAL_S = 300.0
"""Seconds between two checks that read every release record again and list the files of three generations."""


class StoreWatch:
    """Watcher of the artefact store; `problem` is the most urgent one with its remedy, None if there is none.

    A store that does not answer leaves the last known problem: blocklist and loads report it. A lost or older pointer
    is the pointer follower's.
    """

    def __init__(
        self,
        store: ArtefactStore,
        control: ControlPlane,
        releases: ReleaseWatch,
        in_thread: StoreThreads,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem: str | None = None
        self._store = store
        self._control = control
        self._releases = releases
        self._in_thread = in_thread
        self._monotonic_clock = monotonic_clock
        self._files_problem: str | None = None
        self._files_due_at = float("-inf")

    async def refresh(self) -> None:
        """Check pointer and release records, and the files if that is due; log a new problem."""
        pointer = await self._read_pointer()  # before the records: a move is recorded before it is made
        try:
            problem = await self._in_thread(self._find_problem, pointer)
        except (LarderError, OSError, ValueError) as error:
            log.debug("the artefact store cannot be checked: %s", error)
            return
        problem = None if problem is None else mask_secrets(problem)
        if problem is not None and problem != self.problem:
            log.warning("a problem of the artefact store: %s", problem)
        self.problem = problem

    async def _read_pointer(self) -> Pointer | None:
        try:
            pointer_bytes, _ = await self._control.watch()
            return None if pointer_bytes is None else Pointer.from_bytes(pointer_bytes)
        except (TierUnavailable, CorruptArtefact):
            return None

    def _find_problem(self, pointer: Pointer | None) -> str | None:
        if self._monotonic_clock() >= self._files_due_at:
            self._files_due_at = self._monotonic_clock() + FILES_INTERVAL_S
            self._files_problem = self._find_files_problem()
        try:
            history = self._releases.read_records()
        except CorruptArtefact as error:
            return error.message
        if pointer is not None:
            live_key = self._control.keyspace.live
            if unexplained_pointer_problem(pointer, history, self._store, live_key) is not None:
                history = self._releases.reread_records()
                if (problem := unexplained_pointer_problem(pointer, history, self._store, live_key)) is not None:
                    return problem
        return full_store_problem(self._store) or self._files_problem

    def _find_files_problem(self) -> str | None:
        try:
            history = all_releases(self._store)  # not the known ones: a record that was read may be damaged since
        except CorruptArtefact as error:
            return error.message
        problems = generation_files_problems(self._store, history)
        if problems and all_releases(self._store) != history:
            return self._files_problem  # files may have been retired during the check
        return problems[0] if problems else None
