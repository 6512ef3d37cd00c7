"""Source of the blocklist that a replica enforces: the store's newest version, and what a store put back has lost."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from cache.errors import CorruptArtefact, LarderError, StoreError
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import BLOCKLIST_VERSIONS, Blocklist
from cache.store.erasures import all_erasures

_HISTORY_CHECK_S = 10.0
"""Seconds between checks of a version that was read, while the listing of the store stays the same."""

_ERASURES_CHECK_S = 60.0
"""Seconds between reads of the erasures, while the blocklist has all that are known."""


class BlocklistSource:
    """Reads the blocklist to enforce; used by one thread at a time.

    A store that was put back from a copy lacks the versions after the copy, and a block there takes the number of one
    of them. What such versions blocked stays blocked until the newest version in the store blocks it as well, or the
    service is started again. Erased ids stay blocked also if the store lost the versions that block them.
    """

    def __init__(self, store: ArtefactStore, monotonic_clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic_clock = monotonic_clock
        self._stored: Blocklist | None = None
        self._lost = Blocklist()
        self._enforced: Blocklist | None = None
        self._erased, self._erased_read_at = Blocklist(), -math.inf
        self._listed_versions: set[int] = set()
        self._history_checked_at = monotonic_clock()

    def read(self) -> tuple[Blocklist | None, str | None]:
        """Return the blocklist to enforce (None: nothing has been read yet), and why it may not be the newest.

        It is the same object as long as nothing changes. Raises StoreError where there is no store.
        """
        versions = _list_versions(self._store)
        newest_version = max(versions, default=0)
        stored = self._stored
        if stored is not None and self._is_of_another_history(stored, newest_version, versions):
            self._lost = replace(self._lost.with_all_of(stored), version=stored.version)
            self._stored = stored = None
        blocklist, read_error = newest_blocklist(self._store, versions, -1 if stored is None else stored.version)
        if blocklist is not None:
            self._stored = stored = blocklist
            self._note_check(versions)
        if stored is None:
            return self._enforced, read_error
        lost_count = _count_missing(self._lost, stored)
        if not lost_count:
            self._lost, enforced = Blocklist(), stored
        else:
            lost_error = (
                f"the store is older than version {self._lost.version}, which was in force here: {lost_count} ids that"
                " it blocked are missing in the newest version of the store, and stay blocked until they are blocked"
                " there as well"
            )
            read_error = f"{read_error}; {lost_error}" if read_error else lost_error
            enforced = replace(stored.with_all_of(self._lost), version=max(stored.version, self._lost.version))
        enforced, erasures_error = self._with_erased(enforced)
        if erasures_error is not None:
            read_error = f"{read_error}; {erasures_error}" if read_error else erasures_error
        if enforced != self._enforced:
            self._enforced = enforced
        return self._enforced, read_error

    def _with_erased(self, blocklist: Blocklist) -> tuple[Blocklist, str | None]:
        """Return the blocklist with the erased ids that it lacks (versions were lost), and why some may be unknown."""
        read_error, is_due = None, self._monotonic_clock() - self._erased_read_at >= _ERASURES_CHECK_S
        if is_due or _count_missing(self._erased, blocklist):  # they may have been re-admitted since they were read
            try:
                self._erased = _read_erased(self._store)
                self._erased_read_at = self._monotonic_clock()
            except (LarderError, OSError, ValueError) as error:
                read_error = f"erasures cannot be read: {error}"
        if _has_erased(blocklist, self._erased):
            return blocklist, read_error
        return blocklist.with_all_of(self._erased), read_error

    def _is_of_another_history(self, stored: Blocklist, newest_version: int, versions: set[int]) -> bool:
        """Return whether the store no longer has the version that was read last, or has another one by its number."""
        if newest_version < stored.version:
            return True
        if stored.version not in versions:
            return False
        is_same_listing = versions == self._listed_versions
        if is_same_listing and self._monotonic_clock() - self._history_checked_at < _HISTORY_CHECK_S:
            return False
        self._note_check(versions)
        try:
            return _read_version(self._store, stored.version) != stored
        except (LarderError, OSError, ValueError):
            return False  # damaged since it was read

    def _note_check(self, versions: set[int]) -> None:
        self._listed_versions, self._history_checked_at = versions, self._monotonic_clock()


def newest_blocklist(
    store: ArtefactStore, versions: set[int], known_version: int
) -> tuple[Blocklist | None, str | None]:
    """Return the newest readable version above `known_version` (-1: none yet), and why it is not the newest."""
    read_error = None
    for version in sorted(versions, reverse=True):
        if version <= known_version:
            return None, read_error
        try:
            return _read_version(store, version), read_error
        except (LarderError, OSError, ValueError) as error:
            read_error = read_error or f"version {version}: {error}"
    return (Blocklist() if not versions and known_version < 0 else None), read_error


def _read_erased(store: ArtefactStore) -> Blocklist:
    """Return the ids whose erasure is in force, as a blocklist without a version."""
    erasures = [erasure for erasure in all_erasures(store, accepts_lost=True, should_pack=False) if erasure.is_in_force]
    erased_items = frozenset(erasure.raw_id for erasure in erasures if erasure.kind == "item")
    return Blocklist(
        items=erased_items,
        erased_items=erased_items,
        users=frozenset(erasure.raw_id for erasure in erasures if erasure.kind == "user"),
    )


def _list_versions(store: ArtefactStore) -> set[int]:
    """Return the numbers of the versions in the store; raise StoreError for no store."""
    versions = BLOCKLIST_VERSIONS.list_numbers(store)
    if not versions and not store.names(""):
        # An unmounted volume looks like a store without a blocklist.
        raise StoreError(f"{store.url} is empty")
    return versions


def _read_version(store: ArtefactStore, version: int) -> Blocklist:
    blocklist_bytes = store.read(BLOCKLIST_VERSIONS.path(version))
    blocklist = None if blocklist_bytes is None else Blocklist.from_bytes(blocklist_bytes)
    if blocklist is None or blocklist.version != version:
        raise CorruptArtefact("is not there" if blocklist is None else f"calls itself {blocklist.version}")
    return blocklist


def _has_erased(blocklist: Blocklist, erased: Blocklist) -> bool:
    """Return whether a blocklist blocks these erased ids, and knows its items as erased."""
    return not _count_missing(erased, blocklist) and erased.erased_items <= blocklist.erased_items


def _count_missing(lost: Blocklist, stored: Blocklist) -> int:
    """Return how many ids `lost` blocks and `stored` does not."""
    pairs = ((lost.items, stored.items), (lost.entities, stored.entities), (lost.users, stored.users))
    return sum(len(lost_ids - stored_ids) for lost_ids, stored_ids in pairs)
