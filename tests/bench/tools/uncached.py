"""The service without any cache: every request with an input goes to the model, and nothing is stored."""

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
    """Tiers that hold nothing and read nothing."""

    def peek(self, view: SnapshotView, record_key: RecordKey) -> Hit | None:
        """Return no hit."""
        return None

    async def get_many(
        self, view: SnapshotView, record_keys: Sequence[RecordKey], deadline: float, *, is_counted: bool = True
    ) -> list[ReadResult]:
        """Return nothing, since nothing is stored."""
        return [_NOWHERE] * len(record_keys)

    def probe(self, view: SnapshotView, record_key: RecordKey, on_reply: Callable[[bool], None]) -> None:
        """Do nothing."""

    def put_live(
        self,
        view: SnapshotView,
        record_key: RecordKey,
        record: bytes,
        digest: bytes,
        ttl_s: float,
        lease_mark: LeaseMark | None = None,
    ) -> None:
        """Store nothing."""


@contextmanager
def no_tiers() -> Iterator[None]:
    """Within the block, every new service has no tiers."""
    with patch.object(serving.namespace, "TieredCache", NoTiers):
        yield


if __name__ == "__main__":
    with no_tiers():
        sys.exit(main())
