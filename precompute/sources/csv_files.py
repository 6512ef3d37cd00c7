"""CSV files as Arrow columns of texts: read in pieces of complete rows, quoted line breaks included."""

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
from precompute.sources.files import UTF_8_MARK, SourceFile, readable

PIECE_BYTES = 1 << 21
"""Bytes of a file that are parsed at once, more if one row is longer."""
ROW_BYTES_MAX = 64 << 20
"""Bytes of the longest row that is read; a quote open for longer counts as never closed."""
LINES_SUSPECT: Final = 4
"""Lines of one quoted value that each look like a row, from which on a single value suffices to refuse a file."""
BLANKS: Final = " \t\r\n\v\f"
"""Characters to strip from an id or a column's name."""

NO_COLUMN_NAMES: Final = "has no line of column names: put one above, e.g. user,item,timestamp"
ROW_IN_QUOTES: Final = (
    "each row stands between quotes as a whole: put them around single values, or leave them out"
)
_NUMBER_OR_DATE = re.compile(r"[+-]?\d+(\.\d*)?$|\.\d+$|\d{4}-\d{2}-\d{2}")

_NOT_QUOTED = (
    'if quotes in this file do not enclose values, set [sources] quote = ""; if a backslash stands before quotes that '
    'are part of a value, set escape = "\\\\"'
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Characters of a CSV file: between fields, around a value, and before an escaped character; b"": none."""

    separator: bytes
    quote: bytes
    escape: bytes

    @classmethod
    def of(cls, sources: Sources) -> Self:
        """Return the dialect of the settings."""
        return cls(sources.separator.encode(), sources.quote.encode(), sources.escape.encode())

    def with_bare_quotes(self, text: bytes) -> bytes:
        """Return rows without characters before an opening quote: blanks, and byte order marks of joined files."""
        if UTF_8_MARK in text:
            text = text.removeprefix(UTF_8_MARK).replace(b"\n" + UTF_8_MARK, b"\n")
        if not self.quote or self.separator + b" " + self.quote not in text:
            return text
        blanks = rb"(?<=%s) +(?=%s)" % (re.escape(self.separator), re.escape(self.quote))
        return re.sub(blanks, b"", text)

    def with_nulls(self, text: bytes) -> bytes:
        r"""Return text in which a field `\N`, which an escape would make `N`, is empty."""
        if not self.escape or (null_text := self.escape + b"N") not in text:
            return text
        around = re.escape(self.separator) + rb"\r\n"
        return re.sub(rb"(?<![^%s])%s(?![^%s])" % (around, re.escape(null_text), around), b"", text)


@dataclass(frozen=True, slots=True, eq=False)
class QuotePositions:
    """Quotes of a text that begins with a row: their offsets, and whether the text after each is within a value."""

    offsets: NDArray[np.int64]
    is_inside: NDArray[np.bool_]
    """Mask: the text after the quote is within a value."""

    @classmethod
    def of(cls, data: NDArray[np.uint8], dialect: Dialect, escaped: NDArray[np.int64]) -> Self:
        """Find quotes by RFC 4180: one opens a value only at a field's start, two within a value are one."""
        if not dialect.quote:
            return cls(np.empty(0, np.int64), np.empty(0, np.bool_))
        quote_offsets = np.flatnonzero(data == dialect.quote[0])
        if len(escaped):
            quote_offsets = quote_offsets[~np.isin(quote_offsets, escaped)]
        can_open = _one_of(dialect.separator + b"\r\n", data[np.maximum(quote_offsets - 1, 0)])
        can_open |= quote_offsets == 0
        is_second = np.zeros(len(quote_offsets), np.bool_)
        is_second[1:] = quote_offsets[1:] - quote_offsets[:-1] == 1
        # Where no quote stands within an unquoted value, every other one opens a value or is the second of two.
        if (can_open | is_second)[::2].all():
            is_inside = np.append(is_second[1:], False)
            is_inside[::2] = True
            return cls(quote_offsets, is_inside)
        return cls(quote_offsets, _states(can_open, is_second) != _OUTSIDE)

    def inside(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the offsets that are within a quoted value."""
        if not len(self.offsets):
            return np.zeros(len(offsets), np.bool_)
        count = np.searchsorted(self.offsets, offsets)
        return np.asarray((count > 0) & self.is_inside[count - 1])

    @property
    def open_at(self) -> int | None:
        """Offset of the quote whose value is not closed at the end of the text; None if there is none."""
        if not len(self.offsets) or not self.is_inside[-1]:
            return None
        outside = np.flatnonzero(~self.is_inside)
        return int(self.offsets[outside[-1] + 1 if len(outside) else 0])

    @property
    def closing(self) -> NDArray[np.int64]:
        """Offsets of the quotes that end a value."""
        was_inside = np.concatenate([np.zeros(1, np.bool_), self.is_inside[:-1]])
        return self.offsets[was_inside & ~self.is_inside]


_OUTSIDE, _INSIDE, _FIRST_OF_TWO = 0, 1, 2
_STEPS = np.indices((3, 3, 3)).reshape(3, 27).T.astype(np.uint8)
"""Result of a step, by its code, for each state: uint8 [27, 3]; a code has a digit to base 3 for each state."""
_DIGITS = np.array([9, 3, 1], np.uint8)
_THEN = (_STEPS[:, _STEPS] @ _DIGITS).T.copy()
"""Code of one step and then another: uint8 [27, 27]."""
_SCANNED_AT_ONCE = 64


def _states(can_open: NDArray[np.bool_], is_second: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the state after each quote of a text that begins outside of values."""
    is_first = np.append(is_second[1:], False)
    codes = _DIGITS[_OUTSIDE] * np.where(can_open, np.uint8(_INSIDE), np.uint8(_OUTSIDE))
    codes += _DIGITS[_INSIDE] * np.where(is_first, np.uint8(_FIRST_OF_TWO), np.uint8(_OUTSIDE))
    codes += _DIGITS[_FIRST_OF_TWO] * np.uint8(_INSIDE)
    return np.asarray(_STEPS[_scanned(codes), _OUTSIDE])


def _scanned(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the codes of all steps up to each, composed: within rows of a matrix first, then from row to row."""
    if len(codes) <= 1:
        return codes
    rows = -(-len(codes) // _SCANNED_AT_ONCE)
    padded = np.zeros(rows * _SCANNED_AT_ONCE, np.uint8)
    padded[: len(codes)] = codes
    columns = np.ascontiguousarray(padded.reshape(rows, _SCANNED_AT_ONCE).T)
    for number in range(1, _SCANNED_AT_ONCE):
        columns[number] = _THEN[columns[number - 1], columns[number]]
    if rows > 1:
        prefix_codes = _scanned(columns[-1, :-1])
        columns[:, 1:] = _THEN[prefix_codes, columns[:, 1:]]
    return columns.T.reshape(-1)[: len(codes)]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Complete rows of a file, the first of them in line `line`.

    `row_ends` are the offsets after each row, or None if no value holds a line break, so that every line ends one.
    """

    text: bytes
    line: int
    line_break: bytes
    row_ends: NDArray[np.int64] | None

    def line_of(self, offset: int) -> int:
        """Return the number of the line with an offset of the text."""
        return self.line + self.text.count(self.line_break, 0, offset)

    def lines_of_rows(self) -> NDArray[np.int64]:
        """Return int64[rows], the number of each row's first line; empty lines between rows do not count."""
        line_ends = _line_ends(self.text, self.line_break)
        ends = line_ends if self.row_ends is None else self.row_ends
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        starts = starts[starts < len(self.text)]
        starts = starts[~_one_of(b"\r\n", np.frombuffer(self.text, np.uint8)[starts])]
        return np.asarray(self.line + np.searchsorted(line_ends, starts, "right"))

    def behind_first_row(self) -> tuple[bytes, Self]:
        """Return (the first row, the rows after it)."""
        if self.row_ends is None:
            row, row_break, _ = self.text.partition(self.line_break)
            end = len(row) + len(row_break)
            row_ends = None
        else:
            end = int(self.row_ends[0]) if len(self.row_ends) else len(self.text)
            row_ends = self.row_ends[1:] - end
        line = self.line_of(end)
        return self.text[:end], type(self)(self.text[end:], line, self.line_break, row_ends)

    def suspect_values(self, separator: bytes, fields: int) -> tuple[int, list[tuple[int, int]]]:
        """Return (number of multi-line values, (first line, number of lines) of those that look like swallowed rows).

        Each line of these has as many fields as a row, read without quotes: an unclosed quote runs on to the next one.
        """
        if self.row_ends is None:
            return 0, []
        line_ends = _line_ends(self.text, self.line_break)
        separator_offsets = np.flatnonzero(np.frombuffer(self.text, np.uint8) == separator[0])
        counts = np.diff(np.searchsorted(separator_offsets, line_ends), prepend=0)
        last_lines = np.searchsorted(line_ends, self.row_ends)
        first_lines = np.concatenate([np.zeros(1, np.int64), last_lines[:-1] + 1])
        lengths = last_lines - first_lines + 1
        alike = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts == fields - 1)])
        is_alike = alike[last_lines + 1] - alike[first_lines] == lengths
        several = lengths > 1
        suspects = np.flatnonzero(several & is_alike)
        suspect_spans = [(self.line + int(first_lines[row]), int(lengths[row])) for row in suspects]
        return int(several.sum()), suspect_spans


class CsvFile:
    """CSV file that is read once, front to back: the names of its columns, then its rows."""

    def __init__(self, raw: Any, path: SourceFile, dialect: Dialect) -> None:
        self._raw, self._path, self._dialect = raw, path, dialect
        self._unparsed_bytes, self._line, self._line_break = b"", 1, b"\n"
        header, self._first = self._read_header()
        self.names: list[str] = _names_in(header, dialect, path)
        """Names of the columns, without blanks around them."""
        self.has_long_values = self._first.row_ends is not None
        """True if a value read so far holds a line break."""

    @classmethod
    @contextmanager
    def opened(cls, path: SourceFile, sources: Sources) -> Iterator[Self]:
        """Open the file and read its header; raise SourceError if it has none."""
        dialect = Dialect.of(sources)
        with readable(path) as path_or_stream:
            if not isinstance(path_or_stream, Path):
                yield cls(path_or_stream, path, dialect)
                return
            # Arrow knows a compression by the small letters of its ending.
            compression = "gzip" if path_or_stream.suffix.lower() == ".gz" else "detect"
            with pa.input_stream(str(path_or_stream), compression=compression) as raw:
                yield cls(raw, path, dialect)

    def batches(
        self, column_names: Sequence[str], skip_line: Callable[[int], None]
    ) -> Iterator[Any]:
        """Yield record batches of the given columns, as stripped strings that may not be UTF-8.

        `skip_line` is called with the line of each row of more or fewer fields than the header. Raises SourceError
        naming the line of a quote that swallows rows.
        """
        column_indexes = [self.names.index(name) for name in column_names]
        values, suspects, first_suspect = 0, 0, 0
        for piece in self._pieces():
            self.has_long_values |= piece.row_ends is not None
            several, suspect_spans = piece.suspect_values(self._dialect.separator, len(self.names))
            values, suspects = values + several, suspects + len(suspect_spans)
            first_suspect = first_suspect or (suspect_spans[0][0] if suspect_spans else 0)
            for line, lines in suspect_spans:
                if lines >= LINES_SUSPECT:
                    raise self._swallows(line, lines)
            columns = self._columns(piece, column_indexes, skip_line)
            if len(columns[0]):
                yield pa.record_batch(columns, list(column_names))
        if 2 * suspects > values:
            raise self._swallows(first_suspect, 2)

    def find_line_of_names(self) -> tuple[int, list[str]] | None:
        """Return (number, fields) of the first line below the header that has its names in another order, in any case.

        It reads the rest of the file.
        """
        header = [name.lower() for name in self.names]
        names = sorted(header)
        for piece in self._pieces():
            for number, line in enumerate(piece.text.split(self._line_break)):
                if names[-1].encode() not in line.lower():
                    continue
                with suppress(csv.Error):
                    fields = _fields(line.decode(errors="replace"), self._dialect)
                    lowered = [field.lower() for field in fields]
                    if lowered != header and sorted(lowered) == names:
                        return piece.line + number, fields
        return None

    def _swallows(self, line: int, lines: int) -> SourceError:
        return SourceError(
            f"{self._path}, line {line}: a quote is not closed: its value would take {lines} lines or more, each of "
            f"which looks like a row; {_NOT_QUOTED}",
            line=line,
        )

    def _columns(
        self, piece: Piece, column_indexes: Sequence[int], skip_line: Callable[[int], None]
    ) -> list[Any]:
        lines: list[NDArray[np.int64]] = []

        def skip(row: Any) -> str:
            if not lines:
                lines.append(piece.lines_of_rows())
            skip_line(int(lines[0][row.number - 1]))
            return "skip"

        text = self._dialect.with_nulls(piece.text)
        titles = [str(number) for number in range(len(self.names))]
        read = [titles[column_index] for column_index in column_indexes]
        is_quoted = self._dialect.quote in text if self._dialect.quote else False
        table = pa.csv.read_csv(
            pa.py_buffer(text),
            # Without threads, else rows have no numbers.
            read_options=pa.csv.ReadOptions(
                use_threads=False, column_names=titles, block_size=len(text) + 1
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=self._dialect.separator.decode(),
                # What holds no quote is parsed in half the time.
                quote_char=self._dialect.quote.decode() if is_quoted else False,
                escape_char=self._dialect.escape.decode() or False,
                newlines_in_values=piece.row_ends is not None,
                invalid_row_handler=skip,
            ),
            # Left alone, the reader infers types: "007" would become 7, and one odd time would end the file.
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(read, pa.binary()),
                include_columns=read,
                strings_can_be_null=False,
            ),
        )
        columns = (table.column(title).combine_chunks().view(pa.string()) for title in read)
        return [pc.ascii_trim(column, characters=BLANKS) for column in columns]

    def _read_header(self) -> tuple[bytes, Piece]:
        start = self._read(PIECE_BYTES)
        if reason := files.unreadable_by_text(start):
            raise SourceError(f"{self._path} {reason}")
        while start.startswith(UTF_8_MARK):
            start = start.removeprefix(UTF_8_MARK)
        if b"\n" not in start and b"\r" in start:
            self._line_break = b"\r"
        self._unparsed_bytes = start.lstrip(b"\r\n")
        self._line += start.count(self._line_break, 0, len(start) - len(self._unparsed_bytes))
        first = next(self._pieces_of_file(), None)
        if first is None:
            raise SourceError(
                f"cannot read {self._path}: it is empty; a CSV file begins with a line of column names"
            )
        return first.behind_first_row()

    def _pieces(self) -> Iterator[Piece]:
        if self._first.text:
            yield self._first
        yield from self._pieces_of_file()

    def _pieces_of_file(self) -> Iterator[Piece]:
        """Yield the remaining file in pieces that end with a row."""
        is_over = False
        while not is_over:
            block = self._read(max(PIECE_BYTES, len(self._unparsed_bytes)))
            is_over = not block
            text = self._dialect.with_bare_quotes(self._unparsed_bytes + block)
            if not text:
                return
            end, row_ends = self._end_of_rows(text, is_over)
            self._unparsed_bytes = text[end:]
            if end:
                line = self._line
                self._line += text.count(self._line_break, 0, end)
                yield Piece(text[:end], line, self._line_break, row_ends)

    def _read(self, size_bytes: int) -> bytes:
        block: bytes = self._raw.read(size_bytes)
        return block

    def _end_of_rows(self, text: bytes, is_over: bool) -> tuple[int, NDArray[np.int64] | None]:
        """Return (offset after the last complete row, offsets after each row if a value holds a line break).

        Raises SourceError for a quote that is not closed, or is escaped by a character that the settings do not name.
        """
        dialect = self._dialect
        signs = [sign for sign in (dialect.quote, dialect.escape) if sign and sign in text]
        if not signs:
            return self._demand_end(
                len(text) if is_over else text.rfind(self._line_break) + 1, text
            ), None
        data = np.frombuffer(text, np.uint8)
        escaped = _escaped(data, dialect.escape)
        quoting = QuotePositions.of(data, dialect, escaped)
        if dialect.quote and not dialect.escape and b"\\" + dialect.quote in text:
            self._demand_plain_quotes(data, quoting)
        ends = _line_ends(text, self._line_break, is_over=is_over)
        within = quoting.inside(ends)
        if len(escaped):
            within |= np.isin(ends - 1, escaped)
        row_ends = ends[~within]
        opened = quoting.open_at
        if opened is not None and (is_over or len(text) - opened > ROW_BYTES_MAX):
            line = self._line + text.count(self._line_break, 0, opened)
            raise SourceError(
                f"{self._path}, line {line}: a quote is not closed; {_NOT_QUOTED}", line=line
            )
        end = len(text) if is_over else int(row_ends[-1]) if len(row_ends) else 0
        return self._demand_end(end, text), row_ends if within[ends <= end].any() else None

    def _demand_end(self, end: int, text: bytes) -> int:
        """Return the end of the last complete row, 0 to read more first; raise SourceError beyond ROW_BYTES_MAX."""
        if not end and len(text) > ROW_BYTES_MAX:
            raise SourceError(
                f"{self._path}, line {self._line}: it is longer than {ROW_BYTES_MAX >> 20} MiB; is this a CSV file?"
            )
        return end

    def _demand_plain_quotes(self, data: NDArray[np.uint8], quoting: QuotePositions) -> None:
        """Raise SourceError for a backslash before a quote that does not end its field."""
        closing = quoting.closing
        closing = closing[(closing > 0) & (closing + 1 < len(data))]
        closing = closing[data[closing - 1] == ord("\\")]
        dialect = self._dialect
        odd = closing[~_one_of(dialect.separator + dialect.quote + b"\r\n", data[closing + 1])]
        if len(odd):
            line = self._line + bytes(data[: odd[0]]).count(self._line_break)
            raise SourceError(
                f'{self._path}, line {line}: a backslash stands before a quote: set [sources] escape = "\\\\"',
                line=line,
            )


def is_like_a_row(names: Sequence[str]) -> bool:
    """True if one of the names of columns is a number or a date, as in a file without a line of names."""
    return any(_NUMBER_OR_DATE.match(name) for name in names)


def _names_in(header: bytes, dialect: Dialect, path: SourceFile) -> list[str]:
    """Return the names in a file's first row, stripped."""
    try:
        return _fields(header.decode("utf-8"), dialect)
    except csv.Error as error:
        raise SourceError(
            f"{path}: its first line, of column names, cannot be read: {error}"
        ) from None


def _fields(row: str, dialect: Dialect) -> list[str]:
    """Return the fields of one row, stripped; raise csv.Error for a row that cannot be read."""
    reader = csv.reader(
        [row],
        delimiter=dialect.separator.decode(),
        quotechar=dialect.quote.decode() or None,
        quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
        escapechar=dialect.escape.decode() or None,
    )
    return [field.strip(BLANKS) for field in next(reader)]


def _line_ends(text: bytes, line_break: bytes, *, is_over: bool = True) -> NDArray[np.int64]:
    """Return the offsets after each line; the last line may lack its break if the text `is_over`."""
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == line_break[0]) + 1
    if is_over and (not len(ends) or ends[-1] < len(text)):
        ends = np.append(ends, len(text))
    return ends


def _one_of(signs: bytes, values: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask of the values that are one of some characters."""
    is_sign = np.zeros(256, np.bool_)
    is_sign[np.frombuffer(signs, np.uint8)] = True
    return np.asarray(is_sign[values])


def _escaped(data: NDArray[np.uint8], escape: bytes) -> NDArray[np.int64]:
    """Return the offsets of escaped characters; in a run of escapes every other one is escaped itself."""
    if not escape:
        return np.empty(0, np.int64)
    escape_offsets = np.flatnonzero(data == escape[0])
    if not len(escape_offsets):
        return escape_offsets
    is_start = np.concatenate([np.ones(1, np.bool_), np.diff(escape_offsets) != 1])
    starts = np.flatnonzero(is_start)[np.cumsum(is_start) - 1]
    return np.asarray(escape_offsets[(np.arange(len(escape_offsets)) - starts) % 2 == 0] + 1)
