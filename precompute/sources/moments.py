"""Weights and times of the sources, of whatever Arrow types they come in."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import SourceError
from precompute.config.settings import Sources
from precompute.sources import unusable
from precompute.sources.columns import Bad, as_rows, is_text, is_utf_8
from precompute.sources.files import SourceFile

MICROSECONDS = 1_000_000
YEAR_2200_S = 7_258_118_400
YEAR_1_S = -62_135_596_800

_NOTHING = pa.array(["", "NULL", "null", "NaN", "nan", "NA", "N/A", "None", "NaT"])
"""Spellings that programs use for a missing number or time."""
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_ISO = (
    r"^\s*(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})(?:[T ](?P<hour>\d{2})(?::?(?P<minute>\d{2})"
    r"(?::?(?P<second>\d{2})(?:[.,](?P<fraction>\d{1,9}))?)?)?\s*"
    r"(?:[Zz]|(?P<sign>[+-])(?P<zone_hour>\d{2}):?(?P<zone_minute>\d{2})?)?)?\s*$"
)
_ISO_NUMBERS = ("year", "month", "day", "hour", "minute", "second", "zone_hour", "zone_minute")

_PER_SECOND = {"s": 1, "ms": 1_000, "us": MICROSECONDS, "ns": 1_000_000_000}


def are_positive(weights: Any, path: SourceFile, sources: Sources) -> tuple[NDArray[np.bool_], Bad]:
    """Masks of the rows with a weight above 0 (a missing one is not), and of those whose weight says nothing."""
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


def microseconds(times: Any, path: SourceFile, name: str) -> tuple[NDArray[np.int64], Bad]:
    """int64 microseconds since 1970, and which rows have no time that can be used (theirs mean nothing).

    Raises SourceError for a column of a type that holds no times.
    """
    kind = times.type
    missing = as_rows(times.is_null())
    if pa.types.is_null(kind):
        found, readable = np.zeros(len(times), np.int64), ~missing
    elif is_text(kind):
        found, readable, missing = times_of_texts(times)
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        found, readable = _of_timestamps(times)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        found, readable = _of_seconds(np.asarray(pc.fill_null(times, 0)))
    else:
        raise SourceError(
            f"{path}: column {name!r}: timestamps are {kind}; expected a time (in CSV: ISO 8601), or seconds since "
            "1970",
            column=name,
        )
    reason = unusable.NOT_A_TIME if is_text(kind) else unusable.BEYOND
    bad = {f"{name}: {unusable.NO_TIME}": missing, f"{name}: {reason}": ~readable & ~missing}
    return found, {reason: rows for reason, rows in bad.items() if rows.any()}


def _of_timestamps(times: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if pa.types.is_date(times.type):
        times = times.cast(pa.timestamp("ms"))
    per_second = _PER_SECOND[times.type.unit]
    raw = np.asarray(pc.fill_null(times.cast(pa.int64()), 0))
    readable = (raw >= YEAR_1_S * per_second) & (raw < YEAR_2200_S * per_second)
    raw = np.where(readable, raw, 0)
    # Digits below a microsecond are dropped: they could only break ties within one.
    if per_second > MICROSECONDS:
        return raw // (per_second // MICROSECONDS), readable
    return raw * (MICROSECONDS // per_second), readable


def _of_seconds(seconds: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if seconds.dtype.kind not in "iuf":
        seconds = seconds.astype(np.float64)
    readable = (seconds >= 0) & (seconds < YEAR_2200_S)
    kept = np.where(readable, seconds, 0)
    if seconds.dtype.kind == "f":
        return (kept.astype(np.float64) * MICROSECONDS).astype(np.int64), readable
    return kept.astype(np.int64) * MICROSECONDS, readable


def times_of_texts(
    texts: Any,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """(microseconds, which rows hold a time, which hold nothing) of texts: seconds since 1970, or ISO 8601."""
    texts = _readable(texts)
    missing = as_rows(pc.is_in(texts, value_set=_NOTHING))
    texts = pc.if_else(pa.array(missing), "0", texts)
    numbers, is_number = _numbers_of(texts)
    found, readable = _of_seconds(np.asarray(pc.fill_null(numbers, 0)))
    if not is_number.all():
        others = np.flatnonzero(~is_number)
        found[others], readable[others] = _of_iso(texts.take(pa.array(others)))
    return found, readable & ~missing, missing


def _readable(texts: Any) -> Any:
    """Strings, of what is not UTF-8 or missing an empty one."""
    raw = pc.fill_null(texts.cast(pa.large_binary()), b"")
    return pc.if_else(pa.array(is_utf_8(raw)), raw, pa.scalar(b"", raw.type)).cast(pa.string())


def _numbers_of(texts: Any) -> tuple[Any, NDArray[np.bool_]]:
    """(float64, null where there is none; which rows hold a finite number or nothing) of texts."""
    texts = pc.utf8_trim_whitespace(_readable(texts))
    nothing, looks = pc.is_in(texts, value_set=_NOTHING), pc.match_substring_regex(texts, _NUMBER)
    numbers = pc.if_else(looks, texts, pa.scalar(None, pa.string())).cast(pa.float64())
    is_finite = pc.fill_null(pc.is_finite(numbers), False)
    return numbers, as_rows(pc.or_(is_finite, nothing))


def _of_iso(texts: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):  # all of one form: the fast way
        try:
            return _of_timestamps(texts.cast(kind))
        except pa.ArrowInvalid:
            continue
    fields = pc.extract_regex(texts, _ISO)
    numbers = {
        name: np.asarray(pc.if_else(pc.equal(each, ""), "0", each).cast(pa.int64()))
        for name in _ISO_NUMBERS
        for each in (pc.fill_null(pc.struct_field(fields, name), "0"),)
    }
    months = (numbers["year"] - 1970) * 12 + numbers["month"] - 1
    days = months.astype("M8[M]").astype("M8[D]") + (numbers["day"] - 1)
    is_date = (
        (numbers["month"] >= 1)
        & (numbers["month"] <= 12)
        & (days.astype("M8[M]") == months.astype("M8[M]"))
    )
    is_clock = (numbers["hour"] < 24) & (numbers["minute"] < 60) & (numbers["second"] < 60)
    away = numbers["zone_hour"] * 3600 + numbers["zone_minute"] * 60
    east = pc.fill_null(pc.equal(pc.struct_field(fields, "sign"), "-"), False)
    seconds = days.astype(np.int64) * 86_400 + numbers["hour"] * 3600 + numbers["minute"] * 60
    seconds += numbers["second"] + np.where(as_rows(east), away, -away)
    fraction = pc.fill_null(pc.struct_field(fields, "fraction"), "")
    micros = np.asarray(
        pc.utf8_slice_codeunits(pc.utf8_rpad(fraction, 6, "0"), 0, 6).cast(pa.int64())
    )
    readable = as_rows(fields.is_valid()) & is_date & is_clock
    readable &= (seconds >= YEAR_1_S) & (seconds < YEAR_2200_S)
    return np.where(readable, seconds * MICROSECONDS + micros, 0), readable
