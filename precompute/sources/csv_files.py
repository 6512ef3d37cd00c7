"""CSV files as Arrow columns of texts: read in pieces of complete rows; quoted values may have line breaks."""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from cache.config.night import Sources
from cache.errors import SourceError
from precompute.sources import files
from precompute.sources.files import UTF_8_BYTE_ORDER_MARK, SourceFile, open_for_arrow

PARSED_PIECE_BYTES = 1 << 21
"""Bytes of a file that are parsed at once; more if one row is longer."""
ROW_BYTES_MAX = 64 << 20
"""Bytes of the longest row that is read; a quote that is open for longer counts as never closed."""
SUSPECT_LINE_COUNT: Final = 4
"""Lines of a quoted value that all look like rows, from which on one such value is enough to refuse the file."""
BLANK_CHARACTERS: Final = " \t\r\n\v\f"
"""Characters to strip from ids and column names."""

NO_COLUMN_NAMES_REASON: Final = "has no line of column names: put one above, e.g. user,item,timestamp"
ROW_IN_QUOTES_REMEDY: Final = "each row is quoted as a whole: quote single values instead, or remove the quotes"
_NUMBER_OR_DATE_PATTERN = re.compile(r"[+-]?\d+(\.\d*)?$|\.\d+$|\d{4}-\d{2}-\d{2}")

_UNCLOSED_QUOTE_REMEDY = (
    'if quotes in this file do not enclose values, set [sources] quote = ""; if backslashes escape quotes that '
    'are part of a value, set escape = "\\\\"'
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Characters of a CSV file: field separator, quote, and escape; b"" for none."""

    separator_byte: bytes
    quote_byte: bytes
    escape_byte: bytes

    @classmethod
    def of(cls, sources: Sources) -> Self:
        """Return the dialect of the settings."""
        return cls(sources.separator.encode(), sources.quote.encode(), sources.escape.encode())

    def with_bare_quotes(self, csv_text: bytes) -> bytes:
        """Return rows without blanks, and byte order marks of joined files, before an opening quote."""
        if UTF_8_BYTE_ORDER_MARK in csv_text:
            csv_text = csv_text.removeprefix(UTF_8_BYTE_ORDER_MARK).replace(b"\n" + UTF_8_BYTE_ORDER_MARK, b"\n")
        if not self.quote_byte or self.separator_byte + b" " + self.quote_byte not in csv_text:
            return csv_text
        blanks_pattern = rb"(?<=%s) +(?=%s)" % (re.escape(self.separator_byte), re.escape(self.quote_byte))
        return re.sub(blanks_pattern, b"", csv_text)

    def with_nulls(self, csv_text: bytes) -> bytes:
        r"""Return the text with fields `\N` (null in MySQL) emptied, which would be read as an escaped `N`."""
        if not self.escape_byte or (null_text := self.escape_byte + b"N") not in csv_text:
            return csv_text
        boundary_characters = re.escape(self.separator_byte) + rb"\r\n"
        return re.sub(
            rb"(?<![^%s])%s(?![^%s])" % (boundary_characters, re.escape(null_text), boundary_characters), b"", csv_text
        )


@dataclass(frozen=True, slots=True, eq=False)
class QuotePositions:
    """Offsets of the quotes in a text that begins with a row, and whether the text after each is within a value."""

    quote_offsets: NDArray[np.int64]
    is_value_after_quote: NDArray[np.bool_]
    """Mask: the text after the quote is within a value."""

    @classmethod
    def of(cls, text_bytes: NDArray[np.uint8], dialect: Dialect, escaped_offsets: NDArray[np.int64]) -> Self:
        """Find quotes by RFC 4180: a quote opens a value only at a field's start; two within a value are one."""
        if not dialect.quote_byte:
            return cls(np.empty(0, np.int64), np.empty(0, np.bool_))
        quote_offsets = np.flatnonzero(text_bytes == dialect.quote_byte[0])
        if len(escaped_offsets):
            quote_offsets = quote_offsets[~np.isin(quote_offsets, escaped_offsets)]
        can_open = _mask_of_characters(dialect.separator_byte + b"\r\n", text_bytes[np.maximum(quote_offsets - 1, 0)])
        can_open |= quote_offsets == 0
        is_second = np.zeros(len(quote_offsets), np.bool_)
        is_second[1:] = quote_offsets[1:] - quote_offsets[:-1] == 1
        # If no unquoted value has a quote, every other quote opens a value or is the second of two.
        if (can_open | is_second)[::2].all():
            is_inside = np.append(is_second[1:], False)
            is_inside[::2] = True
            return cls(quote_offsets, is_inside)
        return cls(quote_offsets, _states_after_quotes(can_open, is_second) != _OUTSIDE_VALUE)

    def mask_inside_values(self, text_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the mask of the offsets that are within a quoted value."""
        if not len(self.quote_offsets):
            return np.zeros(len(text_offsets), np.bool_)
        preceding_quote_counts = np.searchsorted(self.quote_offsets, text_offsets)
        return np.asarray((preceding_quote_counts > 0) & self.is_value_after_quote[preceding_quote_counts - 1])

    @property
    def unclosed_quote_offset(self) -> int | None:
        """Offset of the quote whose value is not closed at the end of the text; None if all are closed."""
        if not len(self.quote_offsets) or not self.is_value_after_quote[-1]:
            return None
        quotes_ending_outside = np.flatnonzero(~self.is_value_after_quote)
        return int(self.quote_offsets[quotes_ending_outside[-1] + 1 if len(quotes_ending_outside) else 0])

    @property
    def closing_quote_offsets(self) -> NDArray[np.int64]:
        """Offsets of the quotes that end a value."""
        was_inside = np.concatenate([np.zeros(1, np.bool_), self.is_value_after_quote[:-1]])
        return self.quote_offsets[was_inside & ~self.is_value_after_quote]


_OUTSIDE_VALUE, _INSIDE_VALUE, _FIRST_OF_TWO_QUOTES = 0, 1, 2
_NEXT_STATE_BY_STEP = np.indices((3, 3, 3)).reshape(3, 27).T.astype(np.uint8)
"""State after a step, by step code and state before: uint8 [27, 3]. A code has one base-3 digit per state."""
_STATE_DIGIT_FACTORS = np.array([9, 3, 1], np.uint8)
_COMPOSED_STEP_CODES = (_NEXT_STATE_BY_STEP[:, _NEXT_STATE_BY_STEP] @ _STATE_DIGIT_FACTORS).T.copy()
"""Code of one step followed by another: uint8 [27, 27]."""
_STEPS_SCANNED_AT_ONCE = 64


def _states_after_quotes(can_open: NDArray[np.bool_], is_second: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the state after each quote of a text that begins outside of values."""
    is_first_of_two = np.append(is_second[1:], False)
    step_codes = _STATE_DIGIT_FACTORS[_OUTSIDE_VALUE] * np.where(
        can_open, np.uint8(_INSIDE_VALUE), np.uint8(_OUTSIDE_VALUE)
    )
    step_codes += _STATE_DIGIT_FACTORS[_INSIDE_VALUE] * np.where(
        is_first_of_two, np.uint8(_FIRST_OF_TWO_QUOTES), np.uint8(_OUTSIDE_VALUE)
    )
    step_codes += _STATE_DIGIT_FACTORS[_FIRST_OF_TWO_QUOTES] * np.uint8(_INSIDE_VALUE)
    return np.asarray(_NEXT_STATE_BY_STEP[_compose_step_prefixes(step_codes), _OUTSIDE_VALUE])


def _compose_step_prefixes(step_codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the code of all steps up to each one, composed: within rows of a matrix first, then across rows."""
    if len(step_codes) <= 1:
        return step_codes
    matrix_row_count = -(-len(step_codes) // _STEPS_SCANNED_AT_ONCE)
    padded_codes = np.zeros(matrix_row_count * _STEPS_SCANNED_AT_ONCE, np.uint8)
    padded_codes[: len(step_codes)] = step_codes
    code_columns = np.ascontiguousarray(padded_codes.reshape(matrix_row_count, _STEPS_SCANNED_AT_ONCE).T)
    for column_index in range(1, _STEPS_SCANNED_AT_ONCE):
        code_columns[column_index] = _COMPOSED_STEP_CODES[code_columns[column_index - 1], code_columns[column_index]]
    if matrix_row_count > 1:
        prefix_codes = _compose_step_prefixes(code_columns[-1, :-1])
        code_columns[:, 1:] = _COMPOSED_STEP_CODES[prefix_codes, code_columns[:, 1:]]
    return code_columns.T.reshape(-1)[: len(step_codes)]


@dataclass(frozen=True, slots=True, eq=False)
class CsvPiece:
    """Complete rows of a file; the first one is in line `first_line_number`.

    `row_ends` are the offsets after each row; None if no value has a line break, so that rows are lines.
    """

    rows_text: bytes
    first_line_number: int
    line_break_byte: bytes
    row_ends: NDArray[np.int64] | None

    def line_number_of(self, text_offset: int) -> int:
        """Return the number of the line at this offset of the text."""
        return self.first_line_number + self.rows_text.count(self.line_break_byte, 0, text_offset)

    def line_numbers_of_rows(self) -> NDArray[np.int64]:
        """Return int64[rows], the number of each row's first line; empty lines between rows are skipped."""
        line_ends = _line_ends(self.rows_text, self.line_break_byte)
        row_ends = line_ends if self.row_ends is None else self.row_ends
        row_starts = np.concatenate([np.zeros(1, np.int64), row_ends])
        row_starts = row_starts[row_starts < len(self.rows_text)]
        row_starts = row_starts[~_mask_of_characters(b"\r\n", np.frombuffer(self.rows_text, np.uint8)[row_starts])]
        return np.asarray(self.first_line_number + np.searchsorted(line_ends, row_starts, "right"))

    def split_first_row(self) -> tuple[bytes, Self]:
        """Return (the first row, the piece with the remaining rows)."""
        if self.row_ends is None:
            first_row, row_break, _ = self.rows_text.partition(self.line_break_byte)
            first_row_end = len(first_row) + len(row_break)
            row_ends = None
        else:
            first_row_end = int(self.row_ends[0]) if len(self.row_ends) else len(self.rows_text)
            row_ends = self.row_ends[1:] - first_row_end
        next_line_number = self.line_number_of(first_row_end)
        return self.rows_text[:first_row_end], type(self)(
            self.rows_text[first_row_end:], next_line_number, self.line_break_byte, row_ends
        )

    def suspect_values(self, separator_byte: bytes, field_count: int) -> tuple[int, list[tuple[int, int]]]:
        """Return (number of multi-line values, (first line, number of lines) of those that look like swallowed rows).

        In the latter, each line has as many separators as a row: an unclosed quote runs on to the next quote.
        """
        if self.row_ends is None:
            return 0, []
        line_ends = _line_ends(self.rows_text, self.line_break_byte)
        separator_offsets = np.flatnonzero(np.frombuffer(self.rows_text, np.uint8) == separator_byte[0])
        separator_counts = np.diff(np.searchsorted(separator_offsets, line_ends), prepend=0)
        last_lines = np.searchsorted(line_ends, self.row_ends)
        first_lines = np.concatenate([np.zeros(1, np.int64), last_lines[:-1] + 1])
        line_counts = last_lines - first_lines + 1
        alike_line_counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(separator_counts == field_count - 1)])
        is_like_rows = alike_line_counts[last_lines + 1] - alike_line_counts[first_lines] == line_counts
        is_multi_line = line_counts > 1
        suspect_rows = np.flatnonzero(is_multi_line & is_like_rows)
        suspect_spans = [
            (self.first_line_number + int(first_lines[row]), int(line_counts[row])) for row in suspect_rows
        ]
        return int(is_multi_line.sum()), suspect_spans


class CsvFile:
    """CSV file that is read once, front to back: its column names, then its rows."""

    def __init__(self, raw_file: Any, path: SourceFile, dialect: Dialect) -> None:
        self._byte_stream, self._source_file, self._dialect = raw_file, path, dialect
        self._unparsed_bytes, self._next_line_number, self._line_break = b"", 1, b"\n"
        header, self._first_piece = self._read_header()
        self.column_names: list[str] = _column_names_in(header, dialect, path)
        """Names of the columns, stripped of blanks."""
        self.has_long_values = self._first_piece.row_ends is not None
        """True if a value read so far holds a line break."""

    @classmethod
    @contextmanager
    def opened(cls, path: SourceFile, sources: Sources) -> Iterator[Self]:
        """Open the file and read its header; raise SourceError if it has none."""
        dialect = Dialect.of(sources)
        with open_for_arrow(path) as path_or_stream:
            if not isinstance(path_or_stream, Path):
                yield cls(path_or_stream, path, dialect)
                return
            # Arrow only recognises a compression by a lower-case ending.
            compression = "gzip" if path_or_stream.suffix.lower() == ".gz" else "detect"
            with pa.input_stream(str(path_or_stream), compression=compression) as raw:
                yield cls(raw, path, dialect)

    def batches(self, column_names: Sequence[str], skip_line: Callable[[int], None]) -> Iterator[Any]:
        """Yield record batches of the given columns, as stripped strings that may not be UTF-8.

        `skip_line` is called with the line of each row that has more or fewer fields than the header. Raises
        SourceError naming the line of a quote that swallows rows.
        """
        column_indexes = [self.column_names.index(name) for name in column_names]
        multi_line_count, suspect_count, first_suspect_line = 0, 0, 0
        for piece in self._iterate_pieces():
            self.has_long_values |= piece.row_ends is not None
            piece_multi_line_count, suspect_spans = piece.suspect_values(
                self._dialect.separator_byte, len(self.column_names)
            )
            multi_line_count, suspect_count = (
                multi_line_count + piece_multi_line_count,
                suspect_count + len(suspect_spans),
            )
            first_suspect_line = first_suspect_line or (suspect_spans[0][0] if suspect_spans else 0)
            for line_number, line_count in suspect_spans:
                if line_count >= SUSPECT_LINE_COUNT:
                    raise self._unclosed_quote_error(line_number, line_count)
            columns = self._parse_columns(piece, column_indexes, skip_line)
            if len(columns[0]):
                yield pa.record_batch(columns, list(column_names))
        if 2 * suspect_count > multi_line_count:
            raise self._unclosed_quote_error(first_suspect_line, 2)

    def find_line_of_names(self) -> tuple[int, list[str]] | None:
        """Return (number, fields) of the first line with the header's names in another order, ignoring case; else None.

        Reads the rest of the file.
        """
        header_names = [name.lower() for name in self.column_names]
        sorted_names = sorted(header_names)
        for piece in self._iterate_pieces():
            for line_index, line in enumerate(piece.rows_text.split(self._line_break)):
                if sorted_names[-1].encode() not in line.lower():
                    continue
                with suppress(csv.Error):
                    fields = _split_row(line.decode(errors="replace"), self._dialect)
                    lowered_fields = [field.lower() for field in fields]
                    if lowered_fields != header_names and sorted(lowered_fields) == sorted_names:
                        return piece.first_line_number + line_index, fields
        return None

    def _unclosed_quote_error(self, line_number: int, line_count: int) -> SourceError:
        return SourceError(
            f"{self._source_file}, line {line_number}: a quote is not closed: its value would take {line_count} lines "
            "or more, each of "
            f"which looks like a row; {_UNCLOSED_QUOTE_REMEDY}",
            line=line_number,
        )

    def _parse_columns(
        self, piece: CsvPiece, column_indexes: Sequence[int], skip_line: Callable[[int], None]
    ) -> list[Any]:
        row_line_numbers: list[NDArray[np.int64]] = []

        def note_skipped_row(row: Any) -> str:
            if not row_line_numbers:
                row_line_numbers.append(piece.line_numbers_of_rows())
            skip_line(int(row_line_numbers[0][row.number - 1]))
            return "skip"

        csv_text = self._dialect.with_nulls(piece.rows_text)
        number_titles = [str(number) for number in range(len(self.column_names))]
        read_titles = [number_titles[column_index] for column_index in column_indexes]
        is_quoted = self._dialect.quote_byte in csv_text if self._dialect.quote_byte else False
        table = pa.csv.read_csv(
            pa.py_buffer(csv_text),
            # Only without threads do rows have numbers.
            read_options=pa.csv.ReadOptions(
                use_threads=False, column_names=number_titles, block_size=len(csv_text) + 1
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=self._dialect.separator_byte.decode(),
                # Text without quotes is parsed in half the time.
                quote_char=self._dialect.quote_byte.decode() if is_quoted else False,
                escape_char=self._dialect.escape_byte.decode() or False,
                newlines_in_values=piece.row_ends is not None,
                invalid_row_handler=note_skipped_row,
            ),
            # By default the reader infers types: "007" would become 7, and one unusual time would end the reading.
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(read_titles, pa.binary()),
                include_columns=read_titles,
                strings_can_be_null=False,
            ),
        )
        columns = (table.column(title).combine_chunks().view(pa.string()) for title in read_titles)
        return [pc.ascii_trim(column, characters=BLANK_CHARACTERS) for column in columns]

    def _read_header(self) -> tuple[bytes, CsvPiece]:
        first_block = self._read_block(PARSED_PIECE_BYTES)
        if reason := files.unreadable_text_reason(first_block):
            raise SourceError(f"{self._source_file} {reason}")
        while first_block.startswith(UTF_8_BYTE_ORDER_MARK):
            first_block = first_block.removeprefix(UTF_8_BYTE_ORDER_MARK)
        if b"\n" not in first_block and b"\r" in first_block:
            self._line_break = b"\r"
        self._unparsed_bytes = first_block.lstrip(b"\r\n")
        self._next_line_number += first_block.count(self._line_break, 0, len(first_block) - len(self._unparsed_bytes))
        first_piece = next(self._read_pieces(), None)
        if first_piece is None:
            raise SourceError(
                f"cannot read {self._source_file}: it is empty; a CSV file begins with a line of column names"
            )
        return first_piece.split_first_row()

    def _iterate_pieces(self) -> Iterator[CsvPiece]:
        if self._first_piece.rows_text:
            yield self._first_piece
        yield from self._read_pieces()

    def _read_pieces(self) -> Iterator[CsvPiece]:
        """Yield the rest of the file in pieces that end with a row."""
        is_file_read = False
        while not is_file_read:
            block = self._read_block(max(PARSED_PIECE_BYTES, len(self._unparsed_bytes)))
            is_file_read = not block
            unparsed_text = self._dialect.with_bare_quotes(self._unparsed_bytes + block)
            if not unparsed_text:
                return
            rows_end, row_ends = self._find_row_ends(unparsed_text, is_file_read)
            self._unparsed_bytes = unparsed_text[rows_end:]
            if rows_end:
                first_line_number = self._next_line_number
                self._next_line_number += unparsed_text.count(self._line_break, 0, rows_end)
                yield CsvPiece(unparsed_text[:rows_end], first_line_number, self._line_break, row_ends)

    def _read_block(self, size_bytes: int) -> bytes:
        block: bytes = self._byte_stream.read(size_bytes)
        return block

    def _find_row_ends(self, text: bytes, is_file_read: bool) -> tuple[int, NDArray[np.int64] | None]:
        """Return (offset after the last complete row, offsets after each row if a value has a line break, else None).

        Raises SourceError for a quote that is not closed, or is escaped by a character that is not in the settings.
        """
        dialect = self._dialect
        present_signs = [sign for sign in (dialect.quote_byte, dialect.escape_byte) if sign and sign in text]
        if not present_signs:
            return self._demand_row_end(len(text) if is_file_read else text.rfind(self._line_break) + 1, text), None
        text_bytes = np.frombuffer(text, np.uint8)
        escaped_offsets = _escaped_offsets(text_bytes, dialect.escape_byte)
        quote_positions = QuotePositions.of(text_bytes, dialect, escaped_offsets)
        if dialect.quote_byte and not dialect.escape_byte and b"\\" + dialect.quote_byte in text:
            self._demand_plain_quotes(text_bytes, quote_positions)
        line_ends = _line_ends(text, self._line_break, is_complete=is_file_read)
        is_within_value = quote_positions.mask_inside_values(line_ends)
        if len(escaped_offsets):
            is_within_value |= np.isin(line_ends - 1, escaped_offsets)
        row_ends = line_ends[~is_within_value]
        unclosed_offset = quote_positions.unclosed_quote_offset
        if unclosed_offset is not None and (is_file_read or len(text) - unclosed_offset > ROW_BYTES_MAX):
            line_number = self._next_line_number + text.count(self._line_break, 0, unclosed_offset)
            raise SourceError(
                f"{self._source_file}, line {line_number}: a quote is not closed; {_UNCLOSED_QUOTE_REMEDY}",
                line=line_number,
            )
        last_row_end = len(text) if is_file_read else int(row_ends[-1]) if len(row_ends) else 0
        return self._demand_row_end(last_row_end, text), row_ends if is_within_value[
            line_ends <= last_row_end
        ].any() else None

    def _demand_row_end(self, last_row_end: int, text: bytes) -> int:
        """Return the end of the last complete row, 0 if more must be read; raise SourceError beyond ROW_BYTES_MAX."""
        if not last_row_end and len(text) > ROW_BYTES_MAX:
            raise SourceError(
                f"{self._source_file}, line {self._next_line_number}: longer than {ROW_BYTES_MAX >> 20} MiB; is "
                "this a CSV file?"
            )
        return last_row_end

    def _demand_plain_quotes(self, text_bytes: NDArray[np.uint8], quote_positions: QuotePositions) -> None:
        """Raise SourceError for a backslash before a quote that does not end its field."""
        closing_offsets = quote_positions.closing_quote_offsets
        closing_offsets = closing_offsets[(closing_offsets > 0) & (closing_offsets + 1 < len(text_bytes))]
        closing_offsets = closing_offsets[text_bytes[closing_offsets - 1] == ord("\\")]
        dialect = self._dialect
        backslashed_offsets = closing_offsets[
            ~_mask_of_characters(dialect.separator_byte + dialect.quote_byte + b"\r\n", text_bytes[closing_offsets + 1])
        ]
        if len(backslashed_offsets):
            line_number = self._next_line_number + bytes(text_bytes[: backslashed_offsets[0]]).count(self._line_break)
            raise SourceError(
                f"{self._source_file}, line {line_number}: a backslash is before a quote: set [sources] escape = "
                '"\\\\"',
                line=line_number,
            )


def is_like_a_row(column_names: Sequence[str]) -> bool:
    """True if a column name is a number or a date, as in a file without a line of names."""
    return any(_NUMBER_OR_DATE_PATTERN.match(column_name) for column_name in column_names)


def _column_names_in(header_row: bytes, dialect: Dialect, path: SourceFile) -> list[str]:
    """Return the names in a file's first row, stripped."""
    try:
        return _split_row(header_row.decode("utf-8"), dialect)
    except csv.Error as error:
        raise SourceError(f"{path}: its first line, of column names, cannot be read: {error}") from None


def _split_row(row_text: str, dialect: Dialect) -> list[str]:
    """Return the fields of one row, stripped; raise csv.Error for a row that cannot be read."""
    reader = csv.reader(
        [row_text],
        delimiter=dialect.separator_byte.decode(),
        quotechar=dialect.quote_byte.decode() or None,
        quoting=csv.QUOTE_MINIMAL if dialect.quote_byte else csv.QUOTE_NONE,
        escapechar=dialect.escape_byte.decode() or None,
    )
    return [field.strip(BLANK_CHARACTERS) for field in next(reader)]


def _line_ends(file_text: bytes, line_break_byte: bytes, *, is_complete: bool = True) -> NDArray[np.int64]:
    """Return the offsets after each line; if the text `is_complete`, its last line may lack a line break."""
    line_ends = np.flatnonzero(np.frombuffer(file_text, np.uint8) == line_break_byte[0]) + 1
    if is_complete and (not len(line_ends) or line_ends[-1] < len(file_text)):
        line_ends = np.append(line_ends, len(file_text))
    return line_ends


def _mask_of_characters(character_bytes: bytes, text_bytes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return the mask of the bytes that are among the characters."""
    is_character = np.zeros(256, np.bool_)
    is_character[np.frombuffer(character_bytes, np.uint8)] = True
    return np.asarray(is_character[text_bytes])


def _escaped_offsets(text_bytes: NDArray[np.uint8], escape_byte: bytes) -> NDArray[np.int64]:
    """Return the offsets of escaped characters; in a run of escapes, every other one is escaped itself."""
    if not escape_byte:
        return np.empty(0, np.int64)
    escape_offsets = np.flatnonzero(text_bytes == escape_byte[0])
    if not len(escape_offsets):
        return escape_offsets
    is_run_start = np.concatenate([np.ones(1, np.bool_), np.diff(escape_offsets) != 1])
    run_starts = np.flatnonzero(is_run_start)[np.cumsum(is_run_start) - 1]
    return np.asarray(escape_offsets[(np.arange(len(escape_offsets)) - run_starts) % 2 == 0] + 1)
