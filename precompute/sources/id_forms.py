"""Forms of ids: signs that hardly belong to them, and distinct ids that are probably one, in bounded memory."""

import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from precompute.sources.columns import FLOAT, Ids, as_rows, text_hashes

IDS_KEPT: Final = 1 << 21
"""Distinct ids of a kind up to which `IdForms` compares all, by 8 bytes each, more for odd ones; else a share."""

_FORM_ROWS: Final = 1 << 18
"""Ids handled at once."""

GROUPS_TRIED: Final = 1_000
"""Groups of ids among which an example without an erased id is looked for."""

_UPPER, _BLANK, _HIGH, _QUOTE, _PLUS, _POINT, _CONTROL, _ESCAPE = (1 << bit for bit in range(8))
_BYTES_BY_CLASS: Final = {
    _UPPER: bytes(range(ord("A"), ord("Z") + 1)), _BLANK: b" \t\n\v\f\r", _HIGH: bytes(range(0x80, 0x100)),
    _QUOTE: b"'\"", _PLUS: b"+", _POINT: b".,", _CONTROL: bytes([*range(9), *range(14, 32), 127]), _ESCAPE: b"&%",
}  # fmt: skip

_BLANKS = r"[\s\pZ\x{200b}\x{2060}\x{feff}\x{00ad}]+"
_QUOTED = "^=?['‘’‚“”„\"«](.+)['‘’“”\"»]$"
_THOUSANDS = r"^(\d{1,3}),(\d{3})(?:,(\d{3}))?$"
_PADDED_NUMBER = r"^\+?0*(\d+)(?:\.0+|,0{1,2})?$"
_VERSION = r"^\d+[.,]\d*[1-9]\d*$"
_AS_TEXT = "write the column as text: in spreadsheets format it so"


def _make_class_of_byte() -> NDArray[np.uint8]:
    class_of_byte = np.zeros(256, np.uint8)
    for bit, members in _BYTES_BY_CLASS.items():
        class_of_byte[np.frombuffer(members, np.uint8)] = bit
    return class_of_byte


_CLASS_OF_BYTE: Final = _make_class_of_byte()


class _Signs(NamedTuple):
    """Classes of the bytes of each of some names (uint8[n]), and their first and last bytes."""

    classes: NDArray[np.uint8]
    first: NDArray[np.uint8]
    last: NDArray[np.uint8]

    @classmethod
    def of(cls, names: Any) -> "_Signs":
        """Look at Arrow strings, none of them empty."""
        _, cuts, data = names.buffers()
        ends = np.frombuffer(cuts, np.int32)[names.offset : names.offset + len(names) + 1]
        text = np.frombuffer(data, np.uint8)
        classes = _CLASS_OF_BYTE[text[ends[0] : ends[-1]]]
        of_names = (
            np.bitwise_or.reduceat(classes, ends[:-1] - ends[0])
            if classes.any()
            else np.zeros(len(names), np.uint8)
        )
        return cls(of_names, text[ends[:-1]], text[ends[1:] - 1])

    def rows_of(self, bits: int) -> NDArray[np.intp]:
        """Return the names with a byte of one of the classes."""
        return np.flatnonzero(self.classes & np.uint8(bits))

    def number_rows(self) -> NDArray[np.intp]:
        """Return the names with a point or a plus that begin as a number does and end with a digit."""
        is_number = (self.classes & np.uint8(_POINT | _PLUS)) != 0
        return np.flatnonzero(
            is_number & (_is_digit(self.first) | (self.first < ord("."))) & _is_digit(self.last)
        )


def _is_digit(values: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return (values >= ord("0")) & (values <= ord("9"))


class _OddSign(NamedTuple):
    """Pattern of ids with signs that hardly belong to them, the classes of its bytes, the signs, and advice."""

    pattern: str
    bits: int
    sign: str
    advice: str


_ODD_SIGNS: Final = (
    _OddSign(r"^[\s\pZ]|[\s\pZ]$", _BLANK | _HIGH, "blanks around", "trim them in the file"),
    _OddSign('^=".*"$', _QUOTE, 'a spreadsheet\'s ="..." around', f"leave it out; {_AS_TEXT}"),
    _OddSign(
        "^['‘’‚“”„\"«].*['‘’“”\"»]$", _QUOTE | _HIGH, "quotes around",
        "leave them out in the file; in CSV [sources] quote names the one sign around values",
    ),
    _OddSign(
        r"^\d{1,3}(,\d{3})+$", _POINT, "commas between the thousands of", "write the numbers without them"
    ),
    _OddSign(
        "^'[^']*$", _QUOTE, "a spreadsheet's apostrophe before", f"leave it out; {_AS_TEXT}"
    ),
    _OddSign(
        r"[\x00-\x08\x0e-\x1f\x7f]", _CONTROL, "signs for control, such as zero bytes, in",
        "remove them in the file",
    ),
    _OddSign(
        "&([a-z]+|#[0-9]+|#x[0-9a-fA-F]+);|%[0-9A-Fa-f]{2}", _ESCAPE, "escapes of web pages or addresses in",
        "write the signs that they stand for, if other files have these",
    ),
    _OddSign("[\u200b\u2060\ufeff\u00ad]", _HIGH, "signs without width in", "remove them in the file"),
    _OddSign(
        "\ufffd", _HIGH, "the sign \ufffd in",
        "it stands for text that could not be read when the file was written: write the file again, as UTF-8",
    ),
)  # fmt: skip


@dataclass(slots=True)
class _Count:
    """Rows whose ids have a form, and one such id."""

    rows: int = 0
    example: str | None = None

    def add(self, ids: Ids, codes: NDArray[np.intp], hidden: Collection[str]) -> None:
        """Count the rows of some names."""
        if not codes.size:
            return
        has_form = np.zeros(len(ids.names), np.bool_)
        has_form[codes] = True
        self.rows += int(np.count_nonzero(has_form[ids.codes]))
        if self.example is None:
            names = ids.names.take(pa.array(codes[:GROUPS_TRIED])).to_pylist()
            self.example = next((name for name in names if name not in hidden), None)


class OddIds:
    """Counts of a column's rows whose ids have signs that hardly belong to them, or are whole numbers as fractions.

    Ids that are `hidden` are counted and not named.
    """

    def __init__(self, column: str, hidden: Collection[str] = ()) -> None:
        self._column, self._hidden, self._rows = column, hidden, 0
        self._signs = [_Count() for _ in _ODD_SIGNS]
        self._floats, self._versions = _Count(), _Count()

    def add(self, ids: Ids) -> None:
        """Add the next rows."""
        self._rows += len(ids)
        if not len(ids):
            return
        signs = _Signs.of(ids.names)
        if not signs.classes.any():
            return
        for odd, count in zip(_ODD_SIGNS, self._signs, strict=True):
            count.add(ids, _matching(ids.names, signs.rows_of(odd.bits), odd.pattern), self._hidden)
        numbers = signs.number_rows()
        self._floats.add(ids, _matching(ids.names, numbers, FLOAT), self._hidden)
        self._versions.add(ids, _matching(ids.names, numbers, _VERSION), self._hidden)

    def remarks(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield (remark, ids that it names)."""
        for odd, count in zip(_ODD_SIGNS, self._signs, strict=True):
            if count.rows:
                yield self._remark(
                    f"{odd.sign} its ids", count, f"they are part of the ids: {odd.advice}"
                )
        # Among 1.0, 1.1 and 1.2 a whole number is a version.
        if self._floats.rows > self._versions.rows:
            yield self._remark(
                "whole numbers written as fractions", self._floats,
                "the same id as a whole number is another id: write whole numbers (pandas: "
                f'astype("Int64") before to_csv or to_parquet; {_AS_TEXT})',
            )  # fmt: skip

    def _remark(self, what: str, count: _Count, remedy: str) -> tuple[str, Sequence[str]]:
        named = [] if count.example is None else [count.example]
        example = "".join(f", such as {name!r}" for name in named)
        return (
            f"column {self._column!r} has {what} in {count.rows:,} of {self._rows:,} rows{example}; {remedy}",
            named,
        )


def _matching(names: Any, codes: NDArray[np.intp], pattern: str) -> NDArray[np.intp]:
    """Return those of some names that match a pattern."""
    if not codes.size:
        return codes
    return codes[as_rows(pc.match_substring_regex(names.take(pa.array(codes)), pattern))]


def fold(names: Any) -> tuple[NDArray[np.intp], Any]:
    """Return (positions of the Arrow strings that differ from their folded form, these forms).

    The form has composed letters (NFKC) in lower case, and neither blanks, quotes around it, nor a plus, leading zeros,
    `.0` or commas between the thousands of a number.
    """
    signs = _Signs.of(names)
    is_candidate = (signs.classes & np.uint8(_UPPER | _BLANK | _HIGH | _QUOTE)) != 0
    is_candidate |= (signs.first == ord("0")) | (signs.first == ord("+"))
    is_candidate[signs.number_rows()] = True
    rows = np.flatnonzero(is_candidate)
    if not rows.size:
        return rows, names[:0]
    originals = forms = names.take(pa.array(rows))
    classes = int(np.bitwise_or.reduce(signs.classes[rows]))
    if classes & _HIGH:
        forms = pc.utf8_lower(pc.utf8_normalize(forms, "NFKC"))
    elif classes & _UPPER:
        forms = pc.ascii_lower(forms)
    if classes & (_BLANK | _HIGH):
        forms = pc.replace_substring_regex(forms, _BLANKS, "")
    if classes & (_QUOTE | _HIGH):
        forms = pc.replace_substring_regex(forms, _QUOTED, r"\1")
    if classes & _POINT:
        forms = pc.replace_substring_regex(forms, _THOUSANDS, r"\1\2\3")
    forms = pc.replace_substring_regex(forms, _PADDED_NUMBER, r"\1")
    is_other = as_rows(pc.and_(pc.not_equal(forms, originals), pc.not_equal(forms, "")))
    return rows[is_other], forms.filter(pa.array(is_other))


@dataclass(slots=True, eq=False)
class IdForms:
    """Distinct ids of one kind that are probably one id in several forms; thread-safe.

    Ids are known by the hashes of their folded forms (`fold`). Beyond `ids_kept` those with the smallest hashes are
    kept: forms of one id are kept together, or none of them.
    """

    kind: str
    seed: int = 0
    ids_kept: int = IDS_KEPT
    _limit: np.uint64 = field(default_factory=lambda: np.uint64(2**64 - 1))
    _plain: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Sorted hashes of ids that are their folded form."""
    _odd: NDArray[np.uint64] = field(default_factory=lambda: np.empty((0, 2), np.uint64))
    """Hashes of the folded form, and of the id, of the other ids, sorted."""
    _texts: Any = field(default_factory=lambda: pa.array([], pa.large_string()))
    """The other ids."""
    _new_plain: list[NDArray[np.uint64]] = field(default_factory=list)
    _new_odd: list[NDArray[np.uint64]] = field(default_factory=list)
    _new_texts: list[Any] = field(default_factory=list)
    _new: int = 0
    _lock: Any = field(default_factory=Lock)

    def add(self, names: Any, hashes: NDArray[np.uint64] | None = None) -> None:
        """Add Arrow strings, contiguous or chunked, repetitions included; `hashes` are theirs of the seed, if known."""
        chunks = names.chunks if isinstance(names, pa.ChunkedArray) else [names]
        begin = 0
        for chunk in chunks:
            for start in range(0, len(chunk), _FORM_ROWS):
                part = chunk.slice(start, _FORM_ROWS).cast(pa.string())
                part_hashes = (
                    text_hashes(part, self.seed)
                    if hashes is None
                    else hashes[begin : begin + len(part)]
                )
                begin += len(part)
                self._add(part, part_hashes)

    def add_hashes(self, hashes: NDArray[np.uint64]) -> None:
        """Add ids of which the hashes of the seed alone are known."""
        with self._lock:
            self._new_plain.append(hashes[hashes <= self._limit])
            self._note_new(len(self._new_plain[-1]))

    def _add(self, names: Any, hashes: NDArray[np.uint64]) -> None:
        rows, forms = fold(names)
        is_plain = np.ones(len(names), np.bool_)
        is_plain[rows] = False
        form_hashes = text_hashes(forms, self.seed)
        with self._lock:
            is_kept = form_hashes <= self._limit
            plain = hashes[is_plain]
            self._new_plain.append(plain[plain <= self._limit])
            if is_kept.any():
                self._new_odd.append(np.stack([form_hashes, hashes[rows]], 1)[is_kept])
                texts = names.take(pa.array(rows[is_kept]))
                self._new_texts.append(texts.cast(pa.large_string()))
            self._note_new(len(self._new_plain[-1]) + int(is_kept.sum()))

    def _note_new(self, count: int) -> None:
        self._new += count
        if self._new > max(_FORM_ROWS, self.ids_kept // 2):
            self._merge()

    def _merge(self) -> None:
        plain = np.sort(np.concatenate([self._plain, *self._new_plain]))
        self._plain = plain[np.append(True, plain[1:] != plain[:-1])[: len(plain)]]
        if self._new_odd:
            odd = np.concatenate([self._odd, *self._new_odd])
            order = np.lexsort((odd[:, 1], odd[:, 0]))
            odd = odd[order]
            is_first = np.ones(len(odd), np.bool_)
            is_first[1:] = (odd[1:] != odd[:-1]).any(axis=1)
            self._odd = odd[is_first]
            self._texts = pa.concat_arrays([self._texts, *self._new_texts]).take(
                pa.array(order[is_first])
            )
        self._new_plain, self._new_odd, self._new_texts, self._new = [], [], [], 0
        if len(self._plain) + len(self._odd) > self.ids_kept:
            hashes = np.sort(np.concatenate([self._plain, self._odd[:, 0]]))
            self._limit = hashes[self.ids_kept - 1]
            self._plain = self._plain[self._plain <= self._limit]
            kept = int(np.searchsorted(self._odd[:, 0], self._limit, "right"))
            self._odd, self._texts = self._odd[:kept], self._texts[:kept]

    def remark(self, hidden: Collection[str] = ()) -> tuple[str, Sequence[str]] | None:
        """Return (remark on ids in several forms, the ids that it names, none of them `hidden`); None without any."""
        with self._lock:
            self._merge()
            starts = np.flatnonzero(
                np.append(True, self._odd[1:, 0] != self._odd[:-1, 0])[: len(self._odd)]
            )
            sizes = np.diff(np.append(starts, len(self._odd)))
            places = np.minimum(
                np.searchsorted(self._plain, self._odd[starts, 0]), max(0, len(self._plain) - 1)
            )
            is_plain_there = (
                self._plain[places] == self._odd[starts, 0]
                if len(self._plain)
                else np.zeros(len(starts), np.bool_)
            )
            is_group = is_plain_there | (sizes > 1)
            count = int(is_group.sum())
            if not count:
                return None
            pair = self._example(starts[is_group], is_plain_there[is_group], hidden)
        is_share = self._limit < np.uint64(2**64 - 1)
        shown = round(count * 2.0**64 / float(self._limit)) if is_share else count
        is_alone = shown == 1
        subject = f"{'about ' if is_share else ''}{shown:,} {self.kind}{'' if is_alone else 's'}"
        example = f", such as {' and '.join(map(_shown, pair))}," if pair else ""
        remark = (
            f"{subject} {'comes' if is_alone else 'come'} in more than one form{example} and "
            f"{'counts' if is_alone else 'count'} as several: write each id in one form in all files and tables (case, "
            "leading zeros, blanks and Unicode forms make another id)"
        )
        return remark, pair

    def _example(
        self, starts: NDArray[np.intp], is_plain_there: NDArray[np.bool_], hidden: Collection[str]
    ) -> list[str]:
        """Return two forms of one id, neither of them hidden; none if there is no such pair."""
        for start, has_plain in zip(
            starts[:GROUPS_TRIED].tolist(), is_plain_there.tolist(), strict=False
        ):
            texts = self._texts[start : start + (1 if has_plain else 2)].cast(pa.string())
            pair = [*texts.to_pylist(), *(fold(texts)[1].to_pylist() if has_plain else [])]
            if not hidden or not {*pair} & {*hidden}:
                return sorted(pair)
        return []


def _shown(name: str) -> str:
    """Return an id as a message shows it: in escapes if its letters may be composed in two ways."""
    is_one_form = unicodedata.normalize("NFC", name) == unicodedata.normalize("NFD", name)
    return repr(name) if is_one_form else ascii(name)
