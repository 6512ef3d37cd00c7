"""Loader of a batch's work per record, compiled (`native/columns.c`); where it was not built numpy does it, slower."""

import functools
import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any, Protocol

from cache.errors import ConfigError

VERSION = 2
"""Version of the functions and their arguments: what was built from other sources is left alone."""

Lent = Any
"""An object that lends its bytes as one contiguous buffer for the length of a call."""

_log = logging.getLogger(__name__)


class Parts(Protocol):
    """The sorted hashes of an entity set, uint64 part by part."""

    def find(self, hashes: Lent, /) -> bytearray:
        """int64 positions of uint64 hashes, -1 where one is absent."""

    def places(
        self, positions: Lent, first_pages: Lent, per_page: int, size_bytes: int, /
    ) -> tuple[bytes, bytes]:
        """(int64 pages, int64 offsets) of int64 positions; raises ValueError for one that no part has."""


class Columns(Protocol):
    """The compiled module; records are `cache.format.records`', `is_half` those of float16, the others of float32."""

    def Parts(self, firsts: tuple[int, ...], parts: tuple[Lent, ...], /) -> Parts:  # noqa: N802
        """The parts of an entity set from the first hash of each part, and its hashes, which stay lent."""

    def hashes(self, ids: list[bytes], seed: int, /) -> bytearray | None:
        """64-bit xxh3 of each; None if one is longer than 128 bytes."""

    def text_hashes(self, data: Lent, cuts: Lent, seed: int, /) -> bytearray | None:
        """64-bit xxh3 of each text between int32 cuts; None unless these rise within `data`, or if one is too long."""

    def could_be(self, data: bytes, count: int, length: int, /) -> bool:
        """True if `data` is the beginning of, or begins with, `count` bulk strings of `length` bytes."""

    def records_of(
        self,
        data: bytes,
        first: int,
        step: int,
        count: int,
        size: int,
        fingerprints: Lent,
        record_format: int,
        /,
    ) -> tuple[bytearray, int]:
        """A copy of `count` records that lie `step` apart, and how many have that format and their fingerprint."""

    def stream(
        self,
        before: bytes,
        metadata: bytes,
        body_at: int,
        rows_at: int,
        nodes_at: int,
        buffers_at: int,
        rows: int,
        nodes: list[int],
        buffers: list[bytes],
        after: bytes,
        /,
    ) -> bytes:
        """An Arrow IPC stream: `before`, metadata with its numbers, each buffer on a multiple of 8 bytes, `after`."""

    def joined(self, texts: Any, /) -> tuple[bytes, bytes] | None:
        """(int32 cuts, the bytes) of a list of bytes one behind the other; None if it holds anything else."""

    def board(self, flights: dict[Any, Any], keys: list[Any], flight: object, /) -> list[int]:
        """Puts `flight` under each key that is not there yet; returns the places of the others."""

    def leave(self, flights: dict[Any, Any], keys: list[Any], /) -> None:
        """Takes away each key that is there."""

    def spread(
        self, count: int, size: int, rows: Lent, places: list[int], others: dict[int, bytes], /
    ) -> bytearray:
        """`count` records: those of `rows` at `places`, `others` by their places, else zeros."""

    def are_ids(self, ids: list[bytes], most: int, /) -> bool:
        """True if each has a length that an id may have: 1 to `most` bytes."""

    def getranges(self, prefix: bytes, pages: Lent, offsets: Lent, length: int, /) -> bytes:
        """RESP commands that read `length` bytes per int64 page and offset, on the key of `prefix` and page number."""

    def cut_texts(self, data: Lent, cuts: Lent, /) -> list[bytes] | None:
        """The texts between int32 cuts; None unless these rise within `data`, and each is UTF-8."""

    def plain(
        self,
        rows: Lent,
        width: int,
        is_list: bool,
        is_half: bool,
        flags: int,
        least: int,
        safe_exponent: int,
        items: int,
        /,
    ) -> bytes:
        """A byte per record: 1 for whole ones of these flags, with `least` numbers at least, ordinals below `items`."""

    def numbers(self, rows: Lent, width: int, is_list: bool, is_half: bool, k: int, /) -> bytes:
        """float32: the first `k` numbers of each record."""

    def names(
        self, rows: Lent, width: int, is_half: bool, k: int, ids: Lent, offsets: Lent, /
    ) -> tuple[bytes, bytes]:
        """(ids of the first `k` items of each record, one behind the other; int32 cuts, one more than ids)."""

    def answers(
        self,
        rows: Lent,
        width: int,
        is_half: bool,
        k: int,
        ids: Lent,
        offsets: Lent,
        numerals: Lent,
        head: bytes,
        names: list[bytes],
        middle: bytes,
        after: bytes,
        last: bytes,
        ends: list[bytes],
        /,
    ) -> list[bytes] | tuple[int, ...] | None:
        """JSON of each record: head, name, middle, items, after, scores, last, end.

        A tuple: keys of numerals that are missing. None: an id or a number that is written by others.
        """


@functools.cache
def columns() -> Columns | None:
    """The compiled module that this process uses; None where it is missing or switched off."""
    return load(os.environ)


def load(environ: Mapping[str, str]) -> Columns | None:
    """The compiled module; None if missing, of other sources, or LARDER_COLUMNS=off; ConfigError unless auto or off."""
    wanted = environ.get("LARDER_COLUMNS", "auto")
    if wanted not in ("auto", "off"):
        raise ConfigError(f"LARDER_COLUMNS must be auto or off, not {wanted!r}")
    if wanted == "off":
        return None
    try:
        found: Any = importlib.import_module("cache.native._columns")
    except ImportError as error:
        _log.info("batches without what is compiled (%s)", error)
        return None
    if found.VERSION != VERSION:
        _log.warning("cache.native._columns was built from other sources: install again")
        return None
    columns: Columns = found
    return columns
