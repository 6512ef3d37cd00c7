"""The service without any cache: whatever is asked with an input goes to the model, and nothing is kept."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import serving.namespace
from cache.l2.commands import LeaseMark
from cache.tiers.reads import Hit, Miss, MissReason, ReadResult, RecordKey, SnapshotView
from cache.tiers.tiered import TieredCache
from serving.__main__ import main

_NOWHERE = Miss(MissReason.NOT_IN_GENERATION)


class NoTiers(TieredCache):
    """Holds nothing and asks nobody."""

    def peek(self, view: SnapshotView, record_key: RecordKey) -> Hit | None:
        """Never a hit."""
        return None

    async def get_many(
        self, view: SnapshotView, record_keys: Sequence[RecordKey], deadline: float, *, is_counted: bool = True
    ) -> list[ReadResult]:
        """Nothing is stored."""
        return [_NOWHERE] * len(record_keys)

    def probe(self, view: SnapshotView, record_key: RecordKey, on_reply: Callable[[bool], None]) -> None:
        """There is nothing to ask."""

    def put_live(
        self,
        view: SnapshotView,
        record_key: RecordKey,
        record: bytes,
        digest: bytes,
        ttl_s: float,
        lease_mark: LeaseMark | None = None,
    ) -> None:
        """Nothing is kept."""


@contextmanager
def no_tiers() -> Iterator[None]:
    """Whatever service is put together meanwhile has none."""
    with patch.object(serving.namespace, "TieredCache", NoTiers):
        yield


if __name__ == "__main__":
    with no_tiers():
        sys.exit(main())
