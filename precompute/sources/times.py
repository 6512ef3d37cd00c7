"""Columns of weights and times in the sources: conversion from Arrow types, texts and digits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import SourceError
from precompute.config.settings import Sources
from precompute.sources import unusable
from precompute.sources.columns import (
    WORDS_FOR_NOTHING,
    UnusableMaskByReason,
    as_rows,
    is_text,
    is_utf_8,
    without_codes,
)
from precompute.sources.files import SourceFile

MICROSECONDS = 1_000_000
YEAR_2200_S = 7_258_118_400
YEAR_1900_S = -2_208_988_800
YEAR_1980_S = 315_532_800

_MISSING_SPELLINGS = pa.array(["", *WORDS_FOR_NOTHING])
"""Spellings that programs use for a missing number or time."""
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_ISO = (
    r"^\s*(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})(?:[T ](?P<hour>\d{2})(?::?(?P<minute>\d{2})"
    r"(?::?(?P<second>\d{2})(?:[.,](?P<fraction>\d{1,9}))?)?)?\s*"
    r"(?:[Zz]|UTC|GMT|(?P<sign>[+-])(?P<zone_hour>\d{2}):?(?P<zone_minute>\d{2})?)?)?\s*$"
)
_LOST_DIGITS = r"^\d(\.\d{1,6})?[eE]\+\d{2}$"
"""Pattern of numbers of ten digits or more of which a spreadsheet kept a few."""
_LOOKED_AT = 1_000
"""Texts of each batch that are checked for it."""
_LATE_DATE = r"^\s*(2[2-9]\d\d|[3-9]\d{3})-(0[1-9]|1[0-2])-([0-2]\d|3[01])([T ]|\s*$)"
_ISO_NUMBERS = ("year", "month", "day", "hour", "minute", "second", "zone_hour", "zone_minute")

_PER_SECOND = {"s": 1, "ms": 1_000, "us": MICROSECONDS, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class _Digits:
    """Form of numbers that are a date's digits, such as 20231114, with the divisor that leaves the day's digits."""

    form: str
    per_day: int
    """Divisor that leaves year, month and day."""
    clock_digits: int

    def read(self, numbers: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return (int64 seconds since 1970, mask of the numbers of this form that are dates from 1900 on)."""
        is_whole = (numbers >= 1900 * 10_000 * self.per_day) & (
            numbers < 2200 * 10_000 * self.per_day
        )
        moment_digits = np.where(is_whole, numbers, 19700101 * self.per_day).astype(np.int64)
        day, clock = (
            moment_digits // self.per_day,
            moment_digits % self.per_day * 10 ** (6 - self.clock_digits),
        )
        months = (day // 10_000 - 1970) * 12 + day // 100 % 100 - 1
        days = months.astype("M8[M]").astype("M8[D]") + (day % 100 - 1)
        is_date = (day // 100 % 100 >= 1) & (day // 100 % 100 <= 12) & (day % 100 >= 1)
        is_date &= days.astype("M8[M]") == months.astype("M8[M]")
        hour, minute, second = clock // 10_000, clock // 100 % 100, clock % 100
        seconds = days.astype(np.int64) * 86_400 + hour * 3600 + minute * 60 + second
        is_clock = (hour < 24) & (minute < 60) & (second < 60)
        return seconds, is_whole & is_date & is_clock & (numbers == np.floor(numbers))


_DIGITS = (
    _Digits("yyyymmdd", 1, 0), _Digits("yyyymmddhh", 100, 2), _Digits("yyyymmddhhmm", 10_000, 4),
    _Digits("yyyymmddhhmmss", 1_000_000, 6),
)  # fmt: skip
_NO_SECONDS = (
    (1_900, 2_200, "years"),
    (7_305, 84_006, "numbers of days"),
    (190_001, 220_012, "months"),
    (726_834, 767_010, "numbers of days since the year 0"),
    (2_447_892, 2_488_070, "numbers of Julian days"),
)
"""Ranges of numbers that, if they dominate a column, are not seconds since 1970; days are those from 1990 on."""
_SHARE_OF_DIGITS = 0.5
"""Share of a column's first numbers that must be digits of dates for all of it to be read so."""


_SHARE_OF_NO_SECONDS = 0.95
"""Share of a column's first numbers in such a range for the file to be refused; the others mark `never`."""
_DAYS_IN_DIGITS = (
    # Divisors of year, month and day within the number, and the numbers of values behind each.
    ("ddmmyyyy", (1, 10_000), (10_000, 100), (1_000_000, 100)),
    ("mmddyyyy", (1, 10_000), (1_000_000, 100), (10_000, 100)),
    ("yymmdd", (10_000, 100), (100, 100), (1, 100)),
)
"""Forms of dates as digits that are not read, since they are ambiguous: form, then year, month and day."""
DATES_FROM = 19_000_101
DATES_UNTIL = 22_000_101
"""Bounds of dates as the digits yyyymmdd."""
_MOMENTS_IN_DIGITS = (("yymmddhhmm", 100, 10_000_000_000_000), ("mmddhhmmss", 1, 10_000_000_000))
"""Forms of moments as digits that are not read: form, factor that makes its last eight digits ddhhmmss, and bound."""
_MOMENTS_JUDGED = 20
"""Distinct numbers of a column below which moments as digits may be chance, as their days are all one."""
_JUDGED_DISTINCT = 5
"""Distinct numbers of a column below which a form of digits may be chance."""


class TimeScale:
    """Meaning of the numbers in a column of times, decided by its first ones and kept to its end."""

    def __init__(
        self, path: SourceFile, name: str, remark: Callable[[str], None] = lambda _: None
    ) -> None:
        self._path, self._name, self._remark = path, name, remark
        self._digits: _Digits | None = None
        self._is_decided = False
        self._is_since_1980 = False
        """True if most of the first numbers are seconds of 1980 or later: a date as digits is then none of them."""

    def microseconds(self, numbers: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return int64 microseconds since 1970, and a mask of valid times; raise SourceError for numbers of days."""
        if not self._is_decided:
            self._decide(numbers)
        if self._digits is None:
            times_us, is_read = _of_seconds(numbers)
            return times_us, is_read & ~self._days_as_digits(numbers)
        seconds, is_read = self._digits.read(np.asarray(numbers, np.float64))
        return np.where(is_read, seconds, 0) * MICROSECONDS, is_read

    def note_lost_digits(self, texts: Any) -> None:
        """Remark on numbers of which a spreadsheet kept a few digits, so that many times became one."""
        is_short = pc.match_substring_regex(texts, _LOST_DIGITS)
        if pc.any(is_short).as_py():
            self._remark(
                f"column {self._name!r} holds numbers such as {texts.filter(is_short)[0].as_py()!r}, whose last digits "
                "are lost, so that many times are one: in the spreadsheet format the column as whole numbers"
            )

    def _days_as_digits(self, numbers: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of dates such as 20231114 among seconds, which would be in 1970."""
        is_date = np.zeros(len(numbers), np.bool_)
        if self._is_since_1980:
            rows = np.flatnonzero((numbers >= DATES_FROM) & (numbers < DATES_UNTIL))
            if rows.size:
                is_date[rows] = _DIGITS[0].read(np.asarray(numbers[rows], np.float64))[1]
        return is_date

    def _decide(self, numbers: NDArray[Any]) -> None:
        nonzero_numbers = np.asarray(numbers, np.float64)
        nonzero_numbers = nonzero_numbers[np.isfinite(nonzero_numbers) & (nonzero_numbers != 0)]
        if not len(nonzero_numbers):
            return
        self._is_decided = True
        self._is_since_1980 = bool((nonzero_numbers >= YEAR_1980_S).mean() >= _SHARE_OF_DIGITS)
        for digits in _DIGITS:
            _, is_read = digits.read(nonzero_numbers)
            if is_read.mean() > _SHARE_OF_DIGITS:
                self._digits = digits
                self._remark(
                    f"column {self._name!r} holds dates as {digits.form}: they are read so, as UTC"
                )
                return
        if form := _day_form(nonzero_numbers) or _moment_form(nonzero_numbers):
            raise SourceError(
                f"{self._path}: column {self._name!r} holds numbers such as {nonzero_numbers[0]:,.0f}, which look like "
                "dates as "
                f"{form} and not like seconds since 1970: write dates, such as 2023-11-14",
                column=self._name,
            )
        for lower_bound, upper_bound, unit in _NO_SECONDS:
            if (
                (nonzero_numbers >= lower_bound) & (nonzero_numbers <= upper_bound)
            ).mean() >= _SHARE_OF_NO_SECONDS:
                raise SourceError(
                    f"{self._path}: column {self._name!r} holds numbers from {nonzero_numbers.min():,.0f} to "
                    f"{nonzero_numbers.max():,.0f}, which look like {unit} and not like seconds since 1970: write "
                    "dates, "
                    "such as 2023-11-14, or multiply numbers of days since 1970 by 86,400",
                    column=self._name,
                )


def _day_form(numbers: NDArray[np.float64]) -> str | None:
    """Return the form of dates that are not read, if the numbers have one; else None."""
    distinct = np.unique(numbers)
    if len(distinct) < _JUDGED_DISTINCT or not (distinct == np.floor(distinct)).all():
        return None
    whole_numbers = distinct[(distinct > 0) & (distinct < 100_000_000)].astype(np.int64)
    if len(whole_numbers) < _SHARE_OF_NO_SECONDS * len(distinct):
        return None
    for form, *digit_fields in _DAYS_IN_DIGITS:
        year, month, day = (whole_numbers // divisor % count for divisor, count in digit_fields)
        is_day = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
        if form == "yymmdd":
            is_day &= (
                (whole_numbers >= 10_101)
                & (whole_numbers < 1_000_000)
                & ((year >= 80) | (year < 50))
            )
        else:
            is_day &= (year >= 1980) & (year < 2200)
        if is_day.mean() >= _SHARE_OF_NO_SECONDS:
            return form
    years, days = whole_numbers // 1_000, whole_numbers % 1_000
    if (
        (years >= 1980) & (years < 2200) & (days >= 1) & (days <= 366)
    ).mean() >= _SHARE_OF_NO_SECONDS:
        return "yyyyddd"
    return None


def _moment_form(numbers: NDArray[np.float64]) -> str | None:
    """Return the form of moments that are not read, if the numbers have one; else None."""
    distinct = np.unique(numbers)
    if not (distinct == np.floor(distinct)).all() or distinct[0] < 0:
        return None
    for form, factor, upper_bound in _MOMENTS_IN_DIGITS:
        moments = (distinct[distinct * factor < upper_bound] * factor).astype(np.int64)
        if len(moments) < max(_MOMENTS_JUDGED, _SHARE_OF_NO_SECONDS * len(distinct)):
            continue
        month, day, hour, minute, second = (
            moments // divisor % 100 for divisor in (100_000_000, 1_000_000, 10_000, 100, 1)
        )
        is_moment = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
        is_moment &= (hour < 24) & (minute < 60) & (second < 60)
        if is_moment.mean() >= _SHARE_OF_NO_SECONDS and len(np.unique(moments // 1_000_000)) > 1:
            return form
    return None


def are_positive(
    weights: Any, path: SourceFile, sources: Sources
) -> tuple[NDArray[np.bool_], UnusableMaskByReason]:
    """Return masks of the rows with a weight above 0 (a missing one is not), and of those with an invalid weight."""
    weights = without_codes(weights)
    kind, name, reason = (
        weights.type,
        sources.weight_column,
        f"{sources.weight_column}: {unusable.NOT_A_NUMBER}",
    )
    if is_text(kind):
        weights, is_number = _numbers_of(weights)
    elif pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        is_number = np.ones(len(weights), np.bool_)
        weights = weights.cast(pa.float64())
    elif pa.types.is_floating(kind):
        is_number = as_rows(pc.fill_null(pc.is_finite(weights), True))
    else:
        raise SourceError(
            f"{path}: column {name!r} is {kind}; weights are numbers. If it is no weight, name another column in "
            "sources.weight_column",
            column=name,
        )
    positive = as_rows(pc.fill_null(pc.greater(weights, 0), False)) & is_number
    return positive, {} if is_number.all() else {reason: ~is_number}


def microseconds(
    times: Any, path: SourceFile, name: str, clock: TimeScale | None = None
) -> tuple[NDArray[np.int64], UnusableMaskByReason]:
    """Return int64 microseconds since 1970, and masks of the rows without a usable time (theirs are meaningless).

    `clock` is that of the column's earlier batches. Raises SourceError for a column of a type that holds no times.
    """
    clock = TimeScale(path, name) if clock is None else clock
    times = without_codes(times)
    kind = times.type
    missing = as_rows(times.is_null())
    if pa.types.is_null(kind):
        times_us, readable = np.zeros(len(times), np.int64), ~missing
    elif is_text(kind):
        times_us, readable, missing = times_of_texts(times, clock)
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        times_us, readable = _of_timestamps(times)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        times = times.cast(pa.float64()) if pa.types.is_decimal(kind) else times
        times_us, readable = clock.microseconds(np.asarray(pc.fill_null(times, 0)))
    else:
        raise SourceError(
            f"{path}: column {name!r}: timestamps are {kind}; expected a time (in CSV: ISO 8601), or seconds since "
            "1970: if it holds no times, name another column in sources.timestamp_column",
            column=name,
        )
    unread = ~readable & ~missing
    is_beyond = _are_beyond(times, unread) if is_text(kind) else unread
    bad_mask_by_reason = {
        f"{name}: {unusable.NO_TIME}": missing,
        f"{name}: {unusable.BEYOND}": is_beyond,
        f"{name}: {unusable.NOT_A_TIME}": unread & ~is_beyond,
    }
    return times_us, {reason: rows for reason, rows in bad_mask_by_reason.items() if rows.any()}


def _are_beyond(texts: Any, unread: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the unread rows with dates of unsupported years, such as 9999-12-31 for `never`."""
    is_beyond = np.zeros(len(unread), np.bool_)
    if (rows := np.flatnonzero(unread)).size:
        is_beyond[rows] = as_rows(
            pc.match_substring_regex(_readable(texts.take(pa.array(rows))), _LATE_DATE)
        )
    return is_beyond


def _of_timestamps(times: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if pa.types.is_date(times.type):
        times = times.cast(pa.timestamp("ms"))
    per_second = _PER_SECOND[times.type.unit]
    raw = np.asarray(pc.fill_null(times.cast(pa.int64()), 0))
    readable = (raw >= YEAR_1900_S * per_second) & (raw < YEAR_2200_S * per_second)
    raw = np.where(readable, raw, 0)
    # Digits below a microsecond are dropped: they could only break ties within one.
    if per_second > MICROSECONDS:
        return raw // (per_second // MICROSECONDS), readable
    return raw * (MICROSECONDS // per_second), readable


def _of_seconds(seconds: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if seconds.dtype.kind not in "iuf":
        seconds = seconds.astype(np.float64)
    readable = (seconds >= 0) & (seconds < YEAR_2200_S)
    readable_seconds = np.where(readable, seconds, 0)
    if seconds.dtype.kind == "f":
        return (readable_seconds.astype(np.float64) * MICROSECONDS).astype(np.int64), readable
    return readable_seconds.astype(np.int64) * MICROSECONDS, readable


def times_of_texts(
    texts: Any, clock: TimeScale | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Parse texts, numbers as in other columns or ISO 8601: (microseconds, mask of times, mask of missing ones)."""
    texts = _readable(texts)
    missing = as_rows(pc.is_in(texts, value_set=_MISSING_SPELLINGS))
    texts = pc.if_else(pa.array(missing), "0", texts)
    numbers, is_number = _numbers_of(texts)
    values = np.asarray(pc.fill_null(numbers, 0))
    if clock is not None:
        clock.note_lost_digits(texts[:_LOOKED_AT])
    times_us, readable = _of_seconds(values) if clock is None else clock.microseconds(values)
    if not is_number.all():
        non_number_rows = np.flatnonzero(~is_number)
        times_us[non_number_rows], readable[non_number_rows] = _of_iso(
            texts.take(pa.array(non_number_rows))
        )
    return times_us, readable & ~missing, missing


def _readable(texts: Any) -> Any:
    """Return strings, empty for a missing or invalid UTF-8 text."""
    raw = pc.fill_null(texts.cast(pa.large_binary()), b"")
    return pc.if_else(pa.array(is_utf_8(raw)), raw, pa.scalar(b"", raw.type)).cast(pa.string())


def _numbers_of(texts: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Parse texts: (float64 with nulls, mask of the rows with a finite number or a missing value)."""
    texts = pc.utf8_trim_whitespace(_readable(texts))
    is_missing, is_numeric = (
        pc.is_in(texts, value_set=_MISSING_SPELLINGS),
        pc.match_substring_regex(texts, _NUMBER),
    )
    numbers = pc.if_else(is_numeric, texts, pa.scalar(None, pa.string())).cast(pa.float64())
    is_finite = pc.fill_null(pc.is_finite(numbers), False)
    return numbers, as_rows(pc.or_(is_finite, is_missing))


def _of_iso(texts: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):  # all of one form: the fast way
        try:
            return _of_timestamps(texts.cast(kind))
        except pa.ArrowInvalid:
            continue
    fields = pc.extract_regex(texts, _ISO)
    numbers = {
        name: np.asarray(pc.if_else(pc.equal(field_texts, ""), "0", field_texts).cast(pa.int64()))
        for name in _ISO_NUMBERS
        for field_texts in (pc.fill_null(pc.struct_field(fields, name), "0"),)
    }
    months = (numbers["year"] - 1970) * 12 + numbers["month"] - 1
    days = months.astype("M8[M]").astype("M8[D]") + (numbers["day"] - 1)
    is_date = (
        (numbers["month"] >= 1)
        & (numbers["month"] <= 12)
        & (days.astype("M8[M]") == months.astype("M8[M]"))
    )
    is_clock = (numbers["hour"] < 24) & (numbers["minute"] < 60) & (numbers["second"] < 60)
    zone_offset_s = numbers["zone_hour"] * 3600 + numbers["zone_minute"] * 60
    east = pc.fill_null(pc.equal(pc.struct_field(fields, "sign"), "-"), False)
    seconds = days.astype(np.int64) * 86_400 + numbers["hour"] * 3600 + numbers["minute"] * 60
    seconds += numbers["second"] + np.where(as_rows(east), zone_offset_s, -zone_offset_s)
    fraction = pc.fill_null(pc.struct_field(fields, "fraction"), "")
    micros = np.asarray(
        pc.utf8_slice_codeunits(pc.utf8_rpad(fraction, 6, "0"), 0, 6).cast(pa.int64())
    )
    readable = as_rows(fields.is_valid()) & is_date & is_clock
    readable &= (seconds >= YEAR_1900_S) & (seconds < YEAR_2200_S)
    return np.where(readable, seconds * MICROSECONDS + micros, 0), readable
