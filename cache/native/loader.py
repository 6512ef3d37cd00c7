"""Loader of a batch's work per record: compiled (`native/columns.c`), or where it was not built `pure`, slower."""

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any, Protocol

from cache.errors import ConfigError
from cache.format.records.layout import OFFSETS
from cache.native import pure
from cache.native.number_text import DROPPED_BITS, NUMERAL_BYTES
from cache.native.pure import Buffer

VERSION = 3
"""Version of the functions and their arguments: what was built from other sources is left alone."""

_log = logging.getLogger(__name__)


class HashSearch(Protocol):
    """The sorted hashes of an entity set, uint64 part by part."""

    def find(self, hashes: Buffer, /) -> Buffer:
        """int64 positions of uint64 hashes, -1 where one is absent."""

    def places(
        self, positions: Buffer, first_pages: Buffer, per_page: int, size_bytes: int, /
    ) -> tuple[Buffer, Buffer]:
        """(int64 pages, int64 offsets) of int64 positions; raises ValueError for one that no part has."""


class Kernels(Protocol):
    """Functions that are compiled or `pure`; `is_half`: records of float16, otherwise of float32."""

    def HashParts(self, firsts: tuple[int, ...], parts: tuple[Buffer, ...], /) -> HashSearch:  # noqa: N802
        """The parts of an entity set from the first hash of each part, and its hashes, which stay lent."""

    def hashes(self, ids: list[bytes], seed: int, /) -> Buffer | None:
        """64-bit xxh3 of each; None if one is longer than 128 bytes, unless `pure`."""

    def text_hashes(self, data: Buffer, cuts: Buffer, seed: int, /) -> Buffer | None:
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
        fingerprints: Buffer,
        record_format: int,
        /,
    ) -> tuple[Buffer, int]:
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
    ) -> bytes | None:
        """An Arrow IPC stream: `before`, metadata with its numbers, each buffer on a multiple of 8 bytes, `after`.

        None only if `pure`.
        """

    def joined(self, texts: Any, /) -> tuple[bytes, bytes] | None:
        """(int32 cuts, the bytes) of a list of bytes one behind the other; None if it holds anything else."""

    def board(self, flights: dict[Any, Any], keys: list[Any], flight: object, /) -> list[int]:
        """Puts `flight` under each key that is not there yet; returns the places of the others."""

    def leave(self, flights: dict[Any, Any], keys: list[Any], /) -> None:
        """Takes away each key that is there."""

    def spread(
        self, count: int, size: int, rows: Buffer, places: list[int], others: dict[int, bytes], /
    ) -> Buffer:
        """`count` records: those of `rows` at `places`, `others` by their places, else zeros."""

    def are_ids(self, ids: list[bytes], most: int, /) -> bool:
        """True if each has a length that an id may have: 1 to `most` bytes."""

    def getranges(self, prefix: bytes, pages: Buffer, offsets: Buffer, length: int, /) -> bytes:
        """RESP commands that read `length` bytes per int64 page and offset, on the key of `prefix` and page number."""

    def cut_texts(self, data: Buffer, cuts: Buffer, /) -> list[bytes] | None:
        """The texts between int32 cuts; None unless these rise within `data`, and each is UTF-8."""

    def plain(
        self,
        rows: Buffer,
        width: int,
        is_list: bool,
        is_half: bool,
        mask: int,
        flags: int,
        least: int,
        safe_exponent: int,
        items: int,
        /,
    ) -> Buffer:
        """A byte per record: 1 if whole, `flags` in bits `mask`, `least` numbers at least, ordinals below `items`."""

    def numbers(self, rows: Buffer, width: int, is_list: bool, is_half: bool, k: int, /) -> Buffer:
        """float32: the first `k` numbers of each record."""

    def names(
        self, rows: Buffer, width: int, is_half: bool, k: int, ids: Buffer, offsets: Buffer, /
    ) -> tuple[bytes, bytes]:
        """(ids of the first `k` items of each record, one behind the other; int32 cuts, one more than ids)."""

    def answers(
        self,
        rows: Buffer,
        width: int,
        is_half: bool,
        k: int,
        ids: Buffer,
        offsets: Buffer,
        numerals: Buffer,
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


PURE: Kernels = pure
kernels: Kernels
"""The functions that this process uses, found when first asked for: what is wrong with LARDER_COLUMNS is told then."""


def __getattr__(name: str) -> Kernels:
    if name != "kernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = load(os.environ)
    return found


def load(environ: Mapping[str, str]) -> Kernels:
    """The compiled functions; `pure` if they are missing, of other sources, or LARDER_COLUMNS is off.

    Raises ConfigError unless that is auto or off, and for records laid out otherwise than in `cache.format.records`.
    """
    wanted = environ.get("LARDER_COLUMNS", "auto")
    if wanted not in ("auto", "off"):
        raise ConfigError(f"LARDER_COLUMNS must be auto or off, not {wanted!r}")
    if wanted == "off":
        return PURE
    try:
        found: Any = importlib.import_module("cache.native._columns")
    except ImportError as error:
        _log.info("batches without what is compiled (%s)", error)
        return PURE
    if found.VERSION != VERSION:
        _log.warning("cache.native._columns was built from other sources: install again")
        return PURE
    _demand_layout(found.LAYOUT)
    compiled: Kernels = found
    return compiled


def _demand_layout(compiled: Mapping[str, int]) -> None:
    described = {**OFFSETS, "numeral": NUMERAL_BYTES, "dropped_bits": DROPPED_BITS}
    for name, number in compiled.items():
        if described.get(name) != number:
            raise ConfigError(
                f"cache.native._columns was compiled with {name} = {number}, cache.format.records.layout has "
                f"{described.get(name)}: change cache/native/rows.h and install again",
                name=name,
            )
