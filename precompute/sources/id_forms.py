"""Forms of ids: unusual characters in them, and distinct ids that are probably the same, in bounded memory."""

import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from precompute.sources.columns import WHOLE_AS_FRACTION_PATTERN, Ids, as_numpy_mask, text_hashes

IDS_COMPARED_MAX: Final = 1 << 21
"""Distinct ids of a kind up to which `IdForms` compares all (8 bytes each, more for odd ones); beyond, a sample."""

_IDS_FOLDED_AT_ONCE: Final = 1 << 18
"""Ids that are folded at once."""

EXAMPLE_GROUPS_MAX: Final = 1_000
"""Groups of ids that are searched for an example without an erased id."""

(_UPPER_BIT, _BLANK_BIT, _NON_ASCII_BIT, _QUOTE_BIT, _PLUS_BIT, _POINT_BIT, _CONTROL_BIT, _ESCAPE_BIT) = (
    1 << bit for bit in range(8)
)
_BYTES_BY_CLASS_BIT: Final = {
    _UPPER_BIT: bytes(range(ord("A"), ord("Z") + 1)), _BLANK_BIT: b" \t\n\v\f\r", _NON_ASCII_BIT: bytes(range(0x80,
    0x100)),
    _QUOTE_BIT: b"'\"", _PLUS_BIT: b"+", _POINT_BIT: b".,", _CONTROL_BIT: bytes([*range(9), *range(14, 32), 127]),
    _ESCAPE_BIT: b"&%",
}  # fmt: skip

_BLANKS_PATTERN = r"[\s\pZ\x{200b}\x{2060}\x{feff}\x{00ad}]+"
_QUOTED_PATTERN = "^=?['‘’‚“”„\"«](.+)['‘’“”\"»]$"
_THOUSANDS_PATTERN = r"^(\d{1,3}),(\d{3})(?:,(\d{3}))?$"
_PADDED_NUMBER_PATTERN = r"^\+?0*(\d+)(?:\.0+|,0{1,2})?$"
_VERSION_PATTERN = r"^\d+[.,]\d*[1-9]\d*$"
_AS_TEXT_REMEDY = "write the column as text (in spreadsheets, format it as text)"


def _make_class_bit_of_byte() -> NDArray[np.uint8]:
    class_of_byte = np.zeros(256, np.uint8)
    for bit, class_bytes in _BYTES_BY_CLASS_BIT.items():
        class_of_byte[np.frombuffer(class_bytes, np.uint8)] = bit
    return class_of_byte


_CLASS_BIT_OF_BYTE: Final = _make_class_bit_of_byte()


class _ByteClasses(NamedTuple):
    """Classes of the bytes of each id (uint8[n]), and the ids' first and last bytes."""

    class_bits_by_id: NDArray[np.uint8]
    first_bytes: NDArray[np.uint8]
    last_bytes: NDArray[np.uint8]

    @classmethod
    def of(cls, id_texts: Any) -> "_ByteClasses":
        """Classify the bytes of Arrow strings, none of which may be empty."""
        _, offsets_buffer, text_buffer = id_texts.buffers()
        text_offsets = np.frombuffer(offsets_buffer, np.int32)[id_texts.offset : id_texts.offset + len(id_texts) + 1]
        text_bytes = np.frombuffer(text_buffer, np.uint8)
        byte_class_bits = _CLASS_BIT_OF_BYTE[text_bytes[text_offsets[0] : text_offsets[-1]]]
        class_bits_of_ids = (
            np.bitwise_or.reduceat(byte_class_bits, text_offsets[:-1] - text_offsets[0])
            if byte_class_bits.any()
            else np.zeros(len(id_texts), np.uint8)
        )
        return cls(class_bits_of_ids, text_bytes[text_offsets[:-1]], text_bytes[text_offsets[1:] - 1])

    def rows_of(self, class_bits: int) -> NDArray[np.intp]:
        """Return the rows of ids with a byte of one of the classes."""
        return np.flatnonzero(self.class_bits_by_id & np.uint8(class_bits))

    def number_rows(self) -> NDArray[np.intp]:
        """Return the rows of ids with a point or a plus that begin like a number and end with a digit."""
        is_number = (self.class_bits_by_id & np.uint8(_POINT_BIT | _PLUS_BIT)) != 0
        return np.flatnonzero(
            is_number & (_is_digit(self.first_bytes) | (self.first_bytes < ord("."))) & _is_digit(self.last_bytes)
        )


def _is_digit(byte_values: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return (byte_values >= ord("0")) & (byte_values <= ord("9"))


class _OddSign(NamedTuple):
    """Pattern of ids with unusual characters, the classes of their bytes, the characters in words, and advice."""

    id_pattern: str
    byte_class_bits: int
    sign_text: str
    remedy: str


_ODD_SIGNS: Final = (
    _OddSign(r"^[\s\pZ]|[\s\pZ]$", _BLANK_BIT | _NON_ASCII_BIT, "blanks around", "trim them in the file"),
    _OddSign('^=".*"$', _QUOTE_BIT, 'a spreadsheet\'s ="..." around', f"remove it; {_AS_TEXT_REMEDY}"),
    _OddSign(
        "^['‘’‚“”„\"«].*['‘’“”\"»]$", _QUOTE_BIT | _NON_ASCII_BIT, "quotes around",
        "remove them in the file; for CSV, [sources] quote names the quote character",
    ),
    _OddSign(
        r"^\d{1,3}(,\d{3})+$", _POINT_BIT, "commas between the thousands of", "write the numbers without them"
    ),
    _OddSign(
        "^'[^']*$", _QUOTE_BIT, "a spreadsheet's apostrophe before", f"remove it; {_AS_TEXT_REMEDY}"
    ),
    _OddSign(
        r"[\x00-\x08\x0e-\x1f\x7f]", _CONTROL_BIT, "control characters, such as zero bytes, in",
        "remove them in the file",
    ),
    _OddSign(
        "&([a-z]+|#[0-9]+|#x[0-9a-fA-F]+);|%[0-9A-Fa-f]{2}", _ESCAPE_BIT, "HTML or URL escapes in",
        "write the characters themselves if other files have those",
    ),
    _OddSign("[\u200b\u2060\ufeff\u00ad]", _NON_ASCII_BIT, "zero-width characters in", "remove them in the file"),
    _OddSign(
        "\ufffd", _NON_ASCII_BIT, "the replacement character \ufffd in",
        "it stands for text that could not be read when the file was written: write the file again, as UTF-8",
    ),
)  # fmt: skip


@dataclass(slots=True)
class _RowCount:
    """Count of rows whose ids have a form, and one such id."""

    row_count: int = 0
    example_id: str | None = None

    def add(self, ids: Ids, id_codes: NDArray[np.intp], hidden_ids: Collection[str]) -> None:
        """Count the rows of these ids."""
        if not id_codes.size:
            return
        has_form = np.zeros(len(ids.distinct_ids), np.bool_)
        has_form[id_codes] = True
        self.row_count += int(np.count_nonzero(has_form[ids.id_codes]))
        if self.example_id is None:
            example_ids = ids.distinct_ids.take(pa.array(id_codes[:EXAMPLE_GROUPS_MAX])).to_pylist()
            self.example_id = next((id_text for id_text in example_ids if id_text not in hidden_ids), None)


class OddIds:
    """Counts of a column's rows whose ids have unusual characters, or are whole numbers written as fractions.

    Ids in `hidden_ids` are counted but never named.
    """

    def __init__(self, column_name: str, hidden_ids: Collection[str] = ()) -> None:
        self._column, self._hidden_ids, self._row_count = column_name, hidden_ids, 0
        self._count_by_odd_sign = [_RowCount() for _ in _ODD_SIGNS]
        self._whole_as_fraction_count, self._version_count = _RowCount(), _RowCount()

    def add(self, ids: Ids) -> None:
        """Add the next rows."""
        self._row_count += len(ids)
        if not len(ids):
            return
        byte_classes = _ByteClasses.of(ids.distinct_ids)
        if not byte_classes.class_bits_by_id.any():
            return
        for odd_sign, row_count in zip(_ODD_SIGNS, self._count_by_odd_sign, strict=True):
            row_count.add(
                ids,
                _codes_matching(ids.distinct_ids, byte_classes.rows_of(odd_sign.byte_class_bits), odd_sign.id_pattern),
                self._hidden_ids,
            )
        number_codes = byte_classes.number_rows()
        self._whole_as_fraction_count.add(
            ids, _codes_matching(ids.distinct_ids, number_codes, WHOLE_AS_FRACTION_PATTERN), self._hidden_ids
        )
        self._version_count.add(
            ids, _codes_matching(ids.distinct_ids, number_codes, _VERSION_PATTERN), self._hidden_ids
        )

    def remarks(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield (remark, ids that it names)."""
        for odd_sign, row_count in zip(_ODD_SIGNS, self._count_by_odd_sign, strict=True):
            if row_count.row_count:
                yield self._remark(
                    f"{odd_sign.sign_text} its ids", row_count, f"they are part of the ids: {odd_sign.remedy}"
                )
        # If ids such as 1.1 are more frequent than 1.0, both are versions.
        if self._whole_as_fraction_count.row_count > self._version_count.row_count:
            yield self._remark(
                "whole numbers written as fractions", self._whole_as_fraction_count,
                "1.0 and 1 are different ids: write whole numbers (pandas: "
                f'astype("Int64") before to_csv or to_parquet; {_AS_TEXT_REMEDY})',
            )  # fmt: skip

    def _remark(self, form_text: str, row_count: _RowCount, remedy: str) -> tuple[str, Sequence[str]]:
        named_ids = [] if row_count.example_id is None else [row_count.example_id]
        example = "".join(f", such as {name!r}" for name in named_ids)
        return (
            (
                f"column {self._column!r} has {form_text} in {row_count.row_count:,} of {self._row_count:,} "
                f"rows{example}; "
                f"{remedy}"
            ),
            named_ids,
        )


def _codes_matching(id_texts: Any, id_codes: NDArray[np.intp], id_pattern: str) -> NDArray[np.intp]:
    """Return the codes whose ids match a pattern."""
    if not id_codes.size:
        return id_codes
    return id_codes[as_numpy_mask(pc.match_substring_regex(id_texts.take(pa.array(id_codes)), id_pattern))]


def fold_ids(id_texts: Any) -> tuple[NDArray[np.intp], Any]:
    """Return (positions of the Arrow strings that differ from their folded form, the folded forms).

    The folded form is lower-case with composed letters (NFKC), without blanks and surrounding quotes, and in numbers
    without a plus, leading zeros, `.0` and thousands separators.
    """
    byte_classes = _ByteClasses.of(id_texts)
    is_candidate = (
        byte_classes.class_bits_by_id & np.uint8(_UPPER_BIT | _BLANK_BIT | _NON_ASCII_BIT | _QUOTE_BIT)
    ) != 0
    is_candidate |= (byte_classes.first_bytes == ord("0")) | (byte_classes.first_bytes == ord("+"))
    is_candidate[byte_classes.number_rows()] = True
    candidate_positions = np.flatnonzero(is_candidate)
    if not candidate_positions.size:
        return candidate_positions, id_texts[:0]
    original_texts = folded_texts = id_texts.take(pa.array(candidate_positions))
    class_bits = int(np.bitwise_or.reduce(byte_classes.class_bits_by_id[candidate_positions]))
    if class_bits & _NON_ASCII_BIT:
        folded_texts = pc.utf8_lower(pc.utf8_normalize(folded_texts, "NFKC"))
    elif class_bits & _UPPER_BIT:
        folded_texts = pc.ascii_lower(folded_texts)
    if class_bits & (_BLANK_BIT | _NON_ASCII_BIT):
        folded_texts = pc.replace_substring_regex(folded_texts, _BLANKS_PATTERN, "")
    if class_bits & (_QUOTE_BIT | _NON_ASCII_BIT):
        folded_texts = pc.replace_substring_regex(folded_texts, _QUOTED_PATTERN, r"\1")
    if class_bits & _POINT_BIT:
        folded_texts = pc.replace_substring_regex(folded_texts, _THOUSANDS_PATTERN, r"\1\2\3")
    folded_texts = pc.replace_substring_regex(folded_texts, _PADDED_NUMBER_PATTERN, r"\1")
    is_changed = as_numpy_mask(pc.and_(pc.not_equal(folded_texts, original_texts), pc.not_equal(folded_texts, "")))
    return candidate_positions[is_changed], folded_texts.filter(pa.array(is_changed))


@dataclass(slots=True, eq=False)
class IdForms:
    """Distinct ids of one kind that are probably one id in several forms; thread-safe.

    Ids are represented by the hashes of their folded forms (`fold_ids`). Beyond `ids_compared_max`, only ids with the
    smallest hashes are kept, so that all forms of an id are kept, or none.
    """

    entity_kind: str
    hash_seed: int = 0
    ids_compared_max: int = IDS_COMPARED_MAX
    _hash_limit: np.uint64 = field(default_factory=lambda: np.uint64(2**64 - 1))
    _plain_hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Sorted hashes of ids that equal their folded form."""
    _odd_hash_pairs: NDArray[np.uint64] = field(default_factory=lambda: np.empty((0, 2), np.uint64))
    """For the other ids: hashes of the folded form and of the id, sorted."""
    _odd_texts: Any = field(default_factory=lambda: pa.array([], pa.large_string()))
    """Texts of the other ids, in the same order."""
    _new_plain_hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    _new_odd_hash_pairs: list[NDArray[np.uint64]] = field(default_factory=list)
    _new_odd_texts: list[Any] = field(default_factory=list)
    _new_count: int = 0
    _lock: Any = field(default_factory=Lock)

    def add(self, id_texts: Any, id_hashes: NDArray[np.uint64] | None = None) -> None:
        """Add Arrow strings, contiguous or chunked; `id_hashes` are their hashes under the seed, if known."""
        id_chunks = id_texts.chunks if isinstance(id_texts, pa.ChunkedArray) else [id_texts]
        hash_start = 0
        for chunk in id_chunks:
            for chunk_start in range(0, len(chunk), _IDS_FOLDED_AT_ONCE):
                id_part = chunk.slice(chunk_start, _IDS_FOLDED_AT_ONCE).cast(pa.string())
                part_hashes = (
                    text_hashes(id_part, self.hash_seed)
                    if id_hashes is None
                    else id_hashes[hash_start : hash_start + len(id_part)]
                )
                hash_start += len(id_part)
                self._add_chunk(id_part, part_hashes)

    def add_hashes(self, id_hashes: NDArray[np.uint64]) -> None:
        """Add ids of which only the hashes under the seed are known."""
        with self._lock:
            self._new_plain_hashes.append(id_hashes[id_hashes <= self._hash_limit])
            self._note_new(len(self._new_plain_hashes[-1]))

    def _add_chunk(self, id_texts: Any, id_hashes: NDArray[np.uint64]) -> None:
        odd_rows, folded_texts = fold_ids(id_texts)
        is_plain = np.ones(len(id_texts), np.bool_)
        is_plain[odd_rows] = False
        form_hashes = text_hashes(folded_texts, self.hash_seed)
        with self._lock:
            is_kept = form_hashes <= self._hash_limit
            plain_hashes = id_hashes[is_plain]
            self._new_plain_hashes.append(plain_hashes[plain_hashes <= self._hash_limit])
            if is_kept.any():
                self._new_odd_hash_pairs.append(np.stack([form_hashes, id_hashes[odd_rows]], 1)[is_kept])
                odd_texts = id_texts.take(pa.array(odd_rows[is_kept]))
                self._new_odd_texts.append(odd_texts.cast(pa.large_string()))
            self._note_new(len(self._new_plain_hashes[-1]) + int(is_kept.sum()))

    def _note_new(self, new_count: int) -> None:
        self._new_count += new_count
        if self._new_count > max(_IDS_FOLDED_AT_ONCE, self.ids_compared_max // 2):
            self._merge()

    def _merge(self) -> None:
        plain_hashes = np.sort(np.concatenate([self._plain_hashes, *self._new_plain_hashes]))
        self._plain_hashes = plain_hashes[np.append(True, plain_hashes[1:] != plain_hashes[:-1])[: len(plain_hashes)]]
        if self._new_odd_hash_pairs:
            odd_hash_pairs = np.concatenate([self._odd_hash_pairs, *self._new_odd_hash_pairs])
            order = np.lexsort((odd_hash_pairs[:, 1], odd_hash_pairs[:, 0]))
            odd_hash_pairs = odd_hash_pairs[order]
            is_first = np.ones(len(odd_hash_pairs), np.bool_)
            is_first[1:] = (odd_hash_pairs[1:] != odd_hash_pairs[:-1]).any(axis=1)
            self._odd_hash_pairs = odd_hash_pairs[is_first]
            self._odd_texts = pa.concat_arrays([self._odd_texts, *self._new_odd_texts]).take(pa.array(order[is_first]))
        self._new_plain_hashes, self._new_odd_hash_pairs, self._new_odd_texts, self._new_count = ([], [], [], 0)
        if len(self._plain_hashes) + len(self._odd_hash_pairs) > self.ids_compared_max:
            all_hashes = np.sort(np.concatenate([self._plain_hashes, self._odd_hash_pairs[:, 0]]))
            self._hash_limit = all_hashes[self.ids_compared_max - 1]
            self._plain_hashes = self._plain_hashes[self._plain_hashes <= self._hash_limit]
            kept_odd_count = int(np.searchsorted(self._odd_hash_pairs[:, 0], self._hash_limit, "right"))
            self._odd_hash_pairs, self._odd_texts = (
                self._odd_hash_pairs[:kept_odd_count],
                self._odd_texts[:kept_odd_count],
            )

    def remark(self, hidden_ids: Collection[str] = ()) -> tuple[str, Sequence[str]] | None:
        """Return (remark on ids in several forms, the ids that it names, none of them hidden); None without any."""
        with self._lock:
            self._merge()
            group_starts = np.flatnonzero(
                np.append(True, self._odd_hash_pairs[1:, 0] != self._odd_hash_pairs[:-1, 0])[
                    : len(self._odd_hash_pairs)
                ]
            )
            group_sizes = np.diff(np.append(group_starts, len(self._odd_hash_pairs)))
            plain_positions = np.minimum(
                np.searchsorted(self._plain_hashes, self._odd_hash_pairs[group_starts, 0]),
                max(0, len(self._plain_hashes) - 1),
            )
            has_plain_form = (
                self._plain_hashes[plain_positions] == self._odd_hash_pairs[group_starts, 0]
                if len(self._plain_hashes)
                else np.zeros(len(group_starts), np.bool_)
            )
            is_group = has_plain_form | (group_sizes > 1)
            group_count = int(is_group.sum())
            if not group_count:
                return None
            example_pair = self._example(group_starts[is_group], has_plain_form[is_group], hidden_ids)
        is_sampled = self._hash_limit < np.uint64(2**64 - 1)
        shown_count = round(group_count * 2.0**64 / float(self._hash_limit)) if is_sampled else group_count
        is_single = shown_count == 1
        subject = f"{'about ' if is_sampled else ''}{shown_count:,} {self.entity_kind}{'' if is_single else 's'}"
        example = f", such as {' and '.join(map(_id_in_words, example_pair))}," if example_pair else ""
        remark = (
            f"{subject} {'comes' if is_single else 'come'} in more than one form{example} and "
            f"{'counts' if is_single else 'count'} as several: write each id in one form in all files and tables "
            "(case, "
            "leading zeros, blanks and Unicode forms make another id)"
        )
        return remark, example_pair

    def _example(
        self, group_starts: NDArray[np.intp], group_has_plain_form: NDArray[np.bool_], hidden_ids: Collection[str]
    ) -> list[str]:
        """Return two forms of one id, neither of them hidden; empty if there is no such pair."""
        for group_start, has_plain in zip(
            group_starts[:EXAMPLE_GROUPS_MAX].tolist(), group_has_plain_form.tolist(), strict=False
        ):
            form_texts = self._odd_texts[group_start : group_start + (1 if has_plain else 2)].cast(pa.string())
            id_pair = [*form_texts.to_pylist(), *(fold_ids(form_texts)[1].to_pylist() if has_plain else [])]
            if not hidden_ids or not {*id_pair} & {*hidden_ids}:
                return sorted(id_pair)
        return []


def _id_in_words(id_text: str) -> str:
    """Return an id as messages show it: escaped if its letters can be composed in two ways."""
    is_one_form = unicodedata.normalize("NFC", id_text) == unicodedata.normalize("NFD", id_text)
    return repr(id_text) if is_one_form else ascii(id_text)
