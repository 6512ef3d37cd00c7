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
    MISSING_VALUE_WORDS,
    UnusableMaskByReason,
    as_numpy_mask,
    is_text_type,
    normalise_and_decode,
    utf_8_mask,
)
from precompute.sources.files import SourceFile

MICROSECONDS_PER_SECOND = 1_000_000
YEAR_2200_S = 7_258_118_400
YEAR_1900_S = -2_208_988_800
YEAR_1980_S = 315_532_800

_MISSING_VALUE_TEXTS = pa.array(["", *MISSING_VALUE_WORDS])
"""Texts that programs write for a missing number or time."""
_NUMBER_PATTERN = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_ISO_TIME_PATTERN = (
    r"^\s*(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})(?:[T ](?P<hour>\d{2})(?::?(?P<minute>\d{2})"
    r"(?::?(?P<second>\d{2})(?:[.,](?P<fraction>\d{1,9}))?)?)?\s*"
    r"(?:[Zz]|UTC|GMT|(?P<sign>[+-])(?P<zone_hour>\d{2}):?(?P<zone_minute>\d{2})?)?)?\s*$"
)
_LOST_DIGITS_PATTERN = r"^\d(\.\d{1,6})?[eE]\+\d{2}$"
"""Pattern of numbers of ten digits or more that a spreadsheet rounded to a few digits."""
_CHECKED_TEXTS_MAX = 1_000
"""Texts of each batch that are checked for rounded numbers."""
_LATE_DATE_PATTERN = r"^\s*(2[2-9]\d\d|[3-9]\d{3})-(0[1-9]|1[0-2])-([0-2]\d|3[01])([T ]|\s*$)"
_ISO_NUMBER_GROUPS = ("year", "month", "day", "hour", "minute", "second", "zone_hour", "zone_minute")

_TICKS_PER_SECOND_BY_UNIT = {"s": 1, "ms": 1_000, "us": MICROSECONDS_PER_SECOND, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class _DateDigits:
    """Form of numbers that are the digits of a date, such as 20231114."""

    form_text: str
    day_divisor: int
    """Divisor of a number that leaves year, month and day."""
    clock_digits: int

    def read(self, time_numbers: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return (int64 seconds since 1970, mask of the numbers that are dates of this form from 1900 on)."""
        is_whole = (time_numbers >= 1900 * 10_000 * self.day_divisor) & (
            time_numbers < 2200 * 10_000 * self.day_divisor
        )
        moment_digits = np.where(is_whole, time_numbers, 19700101 * self.day_divisor).astype(np.int64)
        day_digits, clock_digits = (
            moment_digits // self.day_divisor,
            moment_digits % self.day_divisor * 10 ** (6 - self.clock_digits),
        )
        months = (day_digits // 10_000 - 1970) * 12 + day_digits // 100 % 100 - 1
        days = months.astype("M8[M]").astype("M8[D]") + (day_digits % 100 - 1)
        is_date = (day_digits // 100 % 100 >= 1) & (day_digits // 100 % 100 <= 12) & (day_digits % 100 >= 1)
        is_date &= days.astype("M8[M]") == months.astype("M8[M]")
        hour, minute, second = clock_digits // 10_000, clock_digits // 100 % 100, clock_digits % 100
        seconds = days.astype(np.int64) * 86_400 + hour * 3600 + minute * 60 + second
        is_clock = (hour < 24) & (minute < 60) & (second < 60)
        return seconds, is_whole & is_date & is_clock & (time_numbers == np.floor(time_numbers))


_DATE_DIGIT_FORMS = (
    _DateDigits("yyyymmdd", 1, 0), _DateDigits("yyyymmddhh", 100, 2), _DateDigits("yyyymmddhhmm", 10_000, 4),
    _DateDigits("yyyymmddhhmmss", 1_000_000, 6),
)  # fmt: skip
_NON_SECOND_RANGES = (
    (1_900, 2_200, "years"),
    (7_305, 84_006, "numbers of days"),
    (190_001, 220_012, "months"),
    (726_834, 767_010, "numbers of days since the year 0"),
    (2_447_892, 2_488_070, "numbers of Julian days"),
)
"""Ranges of numbers that, if they dominate a column, are not seconds since 1970; day numbers are from 1990 on."""
_DIGIT_DATES_SHARE_MIN = 0.5
"""Share of a column's first numbers that must be digits of dates for all of it to be read as dates."""


_NON_SECONDS_SHARE_MIN = 0.95
"""Share of a column's first numbers in such a range from which on the file is refused; the rest may mark `never`."""
_REFUSED_DAY_FORMS = (
    # For year, month and day: divisor within the number, and the modulus of the result.
    ("ddmmyyyy", (1, 10_000), (10_000, 100), (1_000_000, 100)),
    ("mmddyyyy", (1, 10_000), (1_000_000, 100), (10_000, 100)),
    ("yymmdd", (10_000, 100), (100, 100), (1, 100)),
)
"""Forms of dates as digits that are refused as ambiguous: name, then year, month and day."""
DIGIT_DATE_MIN = 19_000_101
DIGIT_DATE_END = 22_000_101
"""Bounds of dates as digits yyyymmdd; the end is exclusive."""
_REFUSED_MOMENT_FORMS = (("yymmddhhmm", 100, 10_000_000_000_000), ("mmddhhmmss", 1, 10_000_000_000))
"""Forms of moments as digits that are refused: name, factor that makes the last eight digits ddhhmmss, and bound."""
_DISTINCT_MOMENTS_MIN = 20
"""Distinct numbers of a column below which moments as digits may be chance."""
_DISTINCT_NUMBERS_MIN = 5
"""Distinct numbers of a column below which dates as digits may be chance."""


class TimeScale:
    """Meaning of the numbers in a column of times, decided by the first batch and kept for the whole file."""

    def __init__(self, path: SourceFile, column_name: str, add_remark: Callable[[str], None] = lambda _: None) -> None:
        self._source_file, self._column_name, self._add_remark = path, column_name, add_remark
        self._date_digits: _DateDigits | None = None
        self._is_decided = False
        self._is_since_1980 = False
        """True if most of the first numbers are seconds from 1980 on, so that a date as digits is not one of them."""

    def microseconds(self, time_numbers: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return int64 microseconds since 1970, and the mask of valid times; raise SourceError for other units."""
        if not self._is_decided:
            self._decide_meaning(time_numbers)
        if self._date_digits is None:
            times_us, is_valid = _seconds_to_us(time_numbers)
            return times_us, is_valid & ~self._digit_date_mask(time_numbers)
        seconds, is_valid = self._date_digits.read(np.asarray(time_numbers, np.float64))
        return np.where(is_valid, seconds, 0) * MICROSECONDS_PER_SECOND, is_valid

    def note_lost_digits(self, time_texts: Any) -> None:
        """Remark on numbers that a spreadsheet rounded to a few digits, so that different times became equal."""
        is_short = pc.match_substring_regex(time_texts, _LOST_DIGITS_PATTERN)
        if pc.any(is_short).as_py():
            self._add_remark(
                f"column {self._column_name!r} holds numbers such as {time_texts.filter(is_short)[0].as_py()!r}, whose "
                "last digits "
                "are lost, so that different times are equal: format the column as whole numbers in the spreadsheet"
            )

    def _digit_date_mask(self, time_numbers: NDArray[Any]) -> NDArray[np.bool_]:
        """Return the mask of dates such as 20231114 among seconds; as seconds they would be in 1970."""
        is_date = np.zeros(len(time_numbers), np.bool_)
        if self._is_since_1980:
            candidate_rows = np.flatnonzero((time_numbers >= DIGIT_DATE_MIN) & (time_numbers < DIGIT_DATE_END))
            if candidate_rows.size:
                is_date[candidate_rows] = _DATE_DIGIT_FORMS[0].read(
                    np.asarray(time_numbers[candidate_rows], np.float64)
                )[1]
        return is_date

    def _decide_meaning(self, time_numbers: NDArray[Any]) -> None:
        nonzero_numbers = np.asarray(time_numbers, np.float64)
        nonzero_numbers = nonzero_numbers[np.isfinite(nonzero_numbers) & (nonzero_numbers != 0)]
        if not len(nonzero_numbers):
            return
        self._is_decided = True
        self._is_since_1980 = bool((nonzero_numbers >= YEAR_1980_S).mean() >= _DIGIT_DATES_SHARE_MIN)
        for date_digits in _DATE_DIGIT_FORMS:
            _, is_read = date_digits.read(nonzero_numbers)
            if is_read.mean() > _DIGIT_DATES_SHARE_MIN:
                self._date_digits = date_digits
                self._add_remark(
                    f"column {self._column_name!r} holds dates as {date_digits.form_text}: they are read as UTC"
                )
                return
        if form := _refused_day_form(nonzero_numbers) or _refused_moment_form(nonzero_numbers):
            raise SourceError(
                f"{self._source_file}: column {self._column_name!r} holds numbers such as {nonzero_numbers[0]:,.0f}, "
                "which look like "
                "dates as "
                f"{form} and not like seconds since 1970: write dates, such as 2023-11-14",
                column=self._column_name,
            )
        for lower_bound, upper_bound, unit in _NON_SECOND_RANGES:
            if ((nonzero_numbers >= lower_bound) & (nonzero_numbers <= upper_bound)).mean() >= _NON_SECONDS_SHARE_MIN:
                raise SourceError(
                    f"{self._source_file}: column {self._column_name!r} holds numbers from "
                    f"{nonzero_numbers.min():,.0f} to "
                    f"{nonzero_numbers.max():,.0f}, which look like {unit} and not like seconds since 1970: write "
                    "dates, "
                    "such as 2023-11-14, or multiply numbers of days since 1970 by 86,400",
                    column=self._column_name,
                )


def _refused_day_form(time_numbers: NDArray[np.float64]) -> str | None:
    """Return the form of refused dates that the numbers have; None if they have none."""
    distinct_numbers = np.unique(time_numbers)
    if len(distinct_numbers) < _DISTINCT_NUMBERS_MIN or not (distinct_numbers == np.floor(distinct_numbers)).all():
        return None
    whole_numbers = distinct_numbers[(distinct_numbers > 0) & (distinct_numbers < 100_000_000)].astype(np.int64)
    if len(whole_numbers) < _NON_SECONDS_SHARE_MIN * len(distinct_numbers):
        return None
    for form, *digit_fields in _REFUSED_DAY_FORMS:
        year, month, day = (whole_numbers // divisor % count for divisor, count in digit_fields)
        is_day = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
        if form == "yymmdd":
            is_day &= (whole_numbers >= 10_101) & (whole_numbers < 1_000_000) & ((year >= 80) | (year < 50))
        else:
            is_day &= (year >= 1980) & (year < 2200)
        if is_day.mean() >= _NON_SECONDS_SHARE_MIN:
            return form
    years, days = whole_numbers // 1_000, whole_numbers % 1_000
    if ((years >= 1980) & (years < 2200) & (days >= 1) & (days <= 366)).mean() >= _NON_SECONDS_SHARE_MIN:
        return "yyyyddd"
    return None


def _refused_moment_form(time_numbers: NDArray[np.float64]) -> str | None:
    """Return the form of refused moments that the numbers have; None if they have none."""
    distinct_numbers = np.unique(time_numbers)
    if not (distinct_numbers == np.floor(distinct_numbers)).all() or distinct_numbers[0] < 0:
        return None
    for form, factor, upper_bound in _REFUSED_MOMENT_FORMS:
        moment_digits = (distinct_numbers[distinct_numbers * factor < upper_bound] * factor).astype(np.int64)
        if len(moment_digits) < max(_DISTINCT_MOMENTS_MIN, _NON_SECONDS_SHARE_MIN * len(distinct_numbers)):
            continue
        month, day, hour, minute, second = (
            moment_digits // divisor % 100 for divisor in (100_000_000, 1_000_000, 10_000, 100, 1)
        )
        is_moment = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
        is_moment &= (hour < 24) & (minute < 60) & (second < 60)
        if is_moment.mean() >= _NON_SECONDS_SHARE_MIN and len(np.unique(moment_digits // 1_000_000)) > 1:
            return form
    return None


def positive_weight_mask(
    weights: Any, path: SourceFile, sources: Sources
) -> tuple[NDArray[np.bool_], UnusableMaskByReason]:
    """Return the mask of rows with a weight above 0 (a missing weight is not), and masks of invalid weights."""
    weights = normalise_and_decode(weights)
    arrow_type, weight_column, reason = (
        weights.type,
        sources.weight_column,
        f"{sources.weight_column}: {unusable.NOT_A_NUMBER_REASON}",
    )
    if is_text_type(arrow_type):
        weights, is_number = _parse_numbers(weights)
    elif pa.types.is_integer(arrow_type) or pa.types.is_decimal(arrow_type) or pa.types.is_null(arrow_type):
        is_number = np.ones(len(weights), np.bool_)
        weights = weights.cast(pa.float64())
    elif pa.types.is_floating(arrow_type):
        is_number = as_numpy_mask(pc.fill_null(pc.is_finite(weights), True))
    else:
        raise SourceError(
            f"{path}: column {weight_column!r} is {arrow_type}; weights are numbers. If this is none, name another "
            "column in "
            "sources.weight_column",
            column=weight_column,
        )
    positive_mask = as_numpy_mask(pc.fill_null(pc.greater(weights, 0), False)) & is_number
    return positive_mask, {} if is_number.all() else {reason: ~is_number}


def parse_times(
    time_column: Any, path: SourceFile, column_name: str, time_scale: TimeScale | None = None
) -> tuple[NDArray[np.int64], UnusableMaskByReason]:
    """Return int64 microseconds since 1970, and masks of the rows without a usable time, whose times are undefined.

    `time_scale` is that of the file's earlier batches. Raises SourceError if the column's type cannot hold times.
    """
    time_scale = TimeScale(path, column_name) if time_scale is None else time_scale
    time_column = normalise_and_decode(time_column)
    arrow_type = time_column.type
    missing_mask = as_numpy_mask(time_column.is_null())
    if pa.types.is_null(arrow_type):
        times_us, readable_mask = np.zeros(len(time_column), np.int64), ~missing_mask
    elif is_text_type(arrow_type):
        times_us, readable_mask, missing_mask = parse_time_texts(time_column, time_scale)
    elif pa.types.is_date(arrow_type) or pa.types.is_timestamp(arrow_type):
        times_us, readable_mask = _timestamps_to_us(time_column)
    elif pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type) or pa.types.is_decimal(arrow_type):
        time_column = time_column.cast(pa.float64()) if pa.types.is_decimal(arrow_type) else time_column
        times_us, readable_mask = time_scale.microseconds(np.asarray(pc.fill_null(time_column, 0)))
    else:
        raise SourceError(
            f"{path}: column {column_name!r}: timestamps are {arrow_type}; expected a time (in CSV: ISO 8601), or "
            "seconds since "
            "1970: if this is not a column of times, name another column in sources.timestamp_column",
            column=column_name,
        )
    unread_mask = ~readable_mask & ~missing_mask
    is_beyond = _out_of_range_mask(time_column, unread_mask) if is_text_type(arrow_type) else unread_mask
    bad_mask_by_reason = {
        f"{column_name}: {unusable.NO_TIME_REASON}": missing_mask,
        f"{column_name}: {unusable.TIME_RANGE_REASON}": is_beyond,
        f"{column_name}: {unusable.NOT_A_TIME_REASON}": unread_mask & ~is_beyond,
    }
    return times_us, {reason: bad_mask for reason, bad_mask in bad_mask_by_reason.items() if bad_mask.any()}


def _out_of_range_mask(time_texts: Any, unread_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the mask of unread rows with dates in unsupported years, such as 9999-12-31 for `never`."""
    is_beyond = np.zeros(len(unread_mask), np.bool_)
    if (unread_rows := np.flatnonzero(unread_mask)).size:
        is_beyond[unread_rows] = as_numpy_mask(
            pc.match_substring_regex(_valid_utf_8_texts(time_texts.take(pa.array(unread_rows))), _LATE_DATE_PATTERN)
        )
    return is_beyond


def _timestamps_to_us(arrow_timestamps: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if pa.types.is_date(arrow_timestamps.type):
        arrow_timestamps = arrow_timestamps.cast(pa.timestamp("ms"))
    ticks_per_second = _TICKS_PER_SECOND_BY_UNIT[arrow_timestamps.type.unit]
    ticks = np.asarray(pc.fill_null(arrow_timestamps.cast(pa.int64()), 0))
    readable_mask = (ticks >= YEAR_1900_S * ticks_per_second) & (ticks < YEAR_2200_S * ticks_per_second)
    ticks = np.where(readable_mask, ticks, 0)
    # Digits below a microsecond are dropped: they could only order times within one microsecond.
    if ticks_per_second > MICROSECONDS_PER_SECOND:
        return ticks // (ticks_per_second // MICROSECONDS_PER_SECOND), readable_mask
    return ticks * (MICROSECONDS_PER_SECOND // ticks_per_second), readable_mask


def _seconds_to_us(unix_seconds: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if unix_seconds.dtype.kind not in "iuf":
        unix_seconds = unix_seconds.astype(np.float64)
    readable_mask = (unix_seconds >= 0) & (unix_seconds < YEAR_2200_S)
    readable_seconds = np.where(readable_mask, unix_seconds, 0)
    if unix_seconds.dtype.kind == "f":
        return (readable_seconds.astype(np.float64) * MICROSECONDS_PER_SECOND).astype(np.int64), readable_mask
    return readable_seconds.astype(np.int64) * MICROSECONDS_PER_SECOND, readable_mask


def parse_time_texts(
    time_texts: Any, time_scale: TimeScale | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Parse numbers or ISO 8601 texts: return (microseconds, mask of valid times, mask of missing ones)."""
    time_texts = _valid_utf_8_texts(time_texts)
    missing_mask = as_numpy_mask(pc.is_in(time_texts, value_set=_MISSING_VALUE_TEXTS))
    time_texts = pc.if_else(pa.array(missing_mask), "0", time_texts)
    numbers, is_number = _parse_numbers(time_texts)
    number_values = np.asarray(pc.fill_null(numbers, 0))
    if time_scale is not None:
        time_scale.note_lost_digits(time_texts[:_CHECKED_TEXTS_MAX])
    times_us, readable_mask = (
        _seconds_to_us(number_values) if time_scale is None else time_scale.microseconds(number_values)
    )
    if not is_number.all():
        non_number_rows = np.flatnonzero(~is_number)
        times_us[non_number_rows], readable_mask[non_number_rows] = _parse_iso_times(
            time_texts.take(pa.array(non_number_rows))
        )
    return times_us, readable_mask & ~missing_mask, missing_mask


def _valid_utf_8_texts(binary_texts: Any) -> Any:
    """Return the texts as strings, empty for a missing or invalid UTF-8 text."""
    raw_texts = pc.fill_null(binary_texts.cast(pa.large_binary()), b"")
    return pc.if_else(pa.array(utf_8_mask(raw_texts)), raw_texts, pa.scalar(b"", raw_texts.type)).cast(pa.string())


def _parse_numbers(number_texts: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Parse texts: return (float64 with nulls, mask of rows with a finite number or a missing value)."""
    number_texts = pc.utf8_trim_whitespace(_valid_utf_8_texts(number_texts))
    is_missing, is_numeric = (
        pc.is_in(number_texts, value_set=_MISSING_VALUE_TEXTS),
        pc.match_substring_regex(number_texts, _NUMBER_PATTERN),
    )
    numbers = pc.if_else(is_numeric, number_texts, pa.scalar(None, pa.string())).cast(pa.float64())
    is_finite = pc.fill_null(pc.is_finite(numbers), False)
    return numbers, as_numpy_mask(pc.or_(is_finite, is_missing))


def _parse_iso_times(time_texts: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    for timestamp_type in (pa.timestamp("us"), pa.timestamp("us", "UTC")):  # fast path: all texts have one form
        try:
            return _timestamps_to_us(time_texts.cast(timestamp_type))
        except pa.ArrowInvalid:
            continue
    regex_groups = pc.extract_regex(time_texts, _ISO_TIME_PATTERN)
    numbers_by_group = {
        group_name: np.asarray(pc.if_else(pc.equal(field_texts, ""), "0", field_texts).cast(pa.int64()))
        for group_name in _ISO_NUMBER_GROUPS
        for field_texts in (pc.fill_null(pc.struct_field(regex_groups, group_name), "0"),)
    }
    months = (numbers_by_group["year"] - 1970) * 12 + numbers_by_group["month"] - 1
    days = months.astype("M8[M]").astype("M8[D]") + (numbers_by_group["day"] - 1)
    is_date = (
        (numbers_by_group["month"] >= 1)
        & (numbers_by_group["month"] <= 12)
        & (days.astype("M8[M]") == months.astype("M8[M]"))
    )
    is_clock = (numbers_by_group["hour"] < 24) & (numbers_by_group["minute"] < 60) & (numbers_by_group["second"] < 60)
    zone_offset_s = numbers_by_group["zone_hour"] * 3600 + numbers_by_group["zone_minute"] * 60
    is_west = pc.fill_null(pc.equal(pc.struct_field(regex_groups, "sign"), "-"), False)
    seconds = days.astype(np.int64) * 86_400 + numbers_by_group["hour"] * 3600 + numbers_by_group["minute"] * 60
    seconds += numbers_by_group["second"] + np.where(as_numpy_mask(is_west), zone_offset_s, -zone_offset_s)
    fraction_texts = pc.fill_null(pc.struct_field(regex_groups, "fraction"), "")
    fraction_us = np.asarray(pc.utf8_slice_codeunits(pc.utf8_rpad(fraction_texts, 6, "0"), 0, 6).cast(pa.int64()))
    readable_mask = as_numpy_mask(regex_groups.is_valid()) & is_date & is_clock
    readable_mask &= (seconds >= YEAR_1900_S) & (seconds < YEAR_2200_S)
    return np.where(readable_mask, seconds * MICROSECONDS_PER_SECOND + fraction_us, 0), readable_mask
