"""Plausibility of interactions: figures that `begin` counts once, and remarks on odd ones.

An odd figure refuses no night: a person may know why it is right.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.config.night import Sources
from cache.errors import ConfigError, LarderError, SourceError
from precompute.sources.csv_files import BLANKS
from precompute.sources.files import SourceFile
from precompute.sources.readers import (
    INTERACTIONS,
    Interactions,
    column_names,
    read_interactions,
)
from precompute.sources.times import MICROSECONDS, YEAR_1980_S
from precompute.sources.unusable import HEADER, SourceReport, UnusableRows, remedy

DAY_S: Final = 86_400
JUDGED_ROWS: Final = 20
"""Rows below which shares of rows are not judged."""

ONE_ID_SHARE: Final = 0.2
"""Share of all rows that a single user or item seldom has: such an id often stands for a missing one."""

ONCE_SHARE: Final = 0.9
"""Share of distinct items among rows from which on nearly each item comes once."""

UNKNOWN_SHARE: Final = 0.2
"""Share of rows whose ids another table lacks from which on the ids of both may have two forms."""

SWAPPED_SHARE: Final = 0.5
"""Share of items that are also users from which on columns may be swapped somewhere."""

LISTS_SHARE: Final = 0.5
"""Share of fields with several words from which on a column may hold lists."""

EARLY_US: Final = YEAR_1980_S * MICROSECONDS
"""Bound before which times among later ones indicate a second unit, or stand for none."""

OLDEST_US: Final = int(datetime(1990, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
"""Bound before which all times indicate a wrong unit."""

FEW_USERS: Final = 100
FEW_ITEMS: Final = 20
"""Numbers of users and items below which the shares that gates judge vary by chance."""

LEAST_USERS: Final = 2
LEAST_ITEMS: Final = 2
"""Numbers of users and items below which there is nothing to learn and nothing to recommend."""

_SEVERAL_WORDS: Final = r"\S[\s,;|]+\S"

_NO_TIME_US: Final = int(np.iinfo(np.int64).min)
_BUCKETS: Final = 1024
"""Counters of users' rows, by the first bits of the hash: a user with many rows seldom shares a counter."""

_BUCKET_SHIFT: Final = np.uint64(64 - 10)


class RowCountsReport(TypedDict):
    """Counts of rows as the report of `begin` has them."""

    user_rows: list[int]
    untimed: int
    newest_us: int
    early: int


@dataclass(slots=True, eq=False)
class RowCounts:
    """Counts of rows of interactions that do not depend on their order, so that counts of two parts can be added."""

    user_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BUCKETS, np.int64))
    untimed: int = 0
    newest_us: int = _NO_TIME_US
    early: int = 0
    """Rows with a time before 1980."""

    @classmethod
    def of_report(cls, report: RowCountsReport) -> Self:
        """Read counts that `to_json` wrote."""
        rows = np.array(report["user_rows"], np.int64)
        # Reports of 0.1 have no count of early times.
        early = int(report.get("early", 0))
        return cls(rows, int(report["untimed"]), int(report["newest_us"]), early)

    def add(self, hashes: NDArray[np.uint64], times: NDArray[np.int64]) -> None:
        """Add rows: the hashes of their users, and their times in microseconds since 1970, 0 for none."""
        self.user_rows += np.bincount(
            (hashes >> _BUCKET_SHIFT).astype(np.int64), minlength=_BUCKETS
        )
        self.untimed += int((times == 0).sum())
        self.newest_us = max(self.newest_us, _newest_us(times))
        self.early += _count_early(times)

    def to_json(self) -> RowCountsReport:
        """Return the counts for a report."""
        return {
            "user_rows": self.user_rows.tolist(),
            "untimed": self.untimed,
            "newest_us": self.newest_us,
            "early": self.early,
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """Figures of a table of interactions, judged by `remarks`; reports omit its ids."""

    rows: int
    users: int
    items: int
    most_of_user: int
    most_of_item: int
    untimed: int
    newest_us: int
    user: str | None = None
    item: str | None = None
    holds_lists: bool = False
    early: int = 0
    """Rows with a time before 1980."""

    @classmethod
    def of_batch(cls, batch: Interactions) -> Self:
        """Compute the figures of some rows, with the most frequent ids."""
        users, items = (np.bincount(ids.codes) for ids in (batch.users, batch.items))
        return cls(
            rows=len(batch.times),
            users=len(users),
            items=len(items),
            most_of_user=int(users.max(initial=0)),
            most_of_item=int(items.max(initial=0)),
            untimed=int((batch.times == 0).sum()),
            newest_us=_newest_us(batch.times),
            user=str(batch.users.names[int(users.argmax())]) if len(users) else None,
            item=str(batch.items.names[int(items.argmax())]) if len(items) else None,
            holds_lists=hold_lists(batch.items.texts()),
            early=_count_early(batch.times),
        )


def remarks(shape: Shape) -> list[str]:
    """Return remarks on odd figures, each with the figure and a remedy."""
    few_ids_remark = few_in_words(shape.users, shape.items)
    return [few_ids_remark, *odd_in_words(shape)] if few_ids_remark else odd_in_words(shape)


def odd_in_words(shape: Shape) -> list[str]:
    """Return the remarks except the one on few users or items."""
    odd_remarks: list[str] = []
    if shape.rows < JUDGED_ROWS:
        return odd_remarks
    for kind, count, top_row_count, name in (
        ("user", shape.users, shape.most_of_user, shape.user),
        ("item", shape.items, shape.most_of_item, shape.item),
    ):
        # With few ids a fifth of the rows is no more than a share.
        if top_row_count >= ONE_ID_SHARE * shape.rows and count >= 5 / ONE_ID_SHARE:
            subject = f"the {kind} {name!r}" if name is not None else f"one {kind}"
            odd_remarks.append(
                f"{subject} has {top_row_count / shape.rows:.0%} of all rows: if that id stands for nobody in "
                "particular, or for "
                "a missing one, leave its rows out"
            )
    if shape.items >= ONCE_SHARE * shape.rows or shape.holds_lists:
        several = ", and most hold several words" if shape.holds_lists else ""
        odd_remarks.append(
            f"{shape.items:,} items in {shape.rows:,} rows: nearly each comes once{several}, so nothing can be "
            "learnt of them. Is the right column named, and does a row hold one item of one user?"
        )
    tomorrow_us = int((time.time() + DAY_S) * MICROSECONDS)
    if shape.untimed < shape.rows and not OLDEST_US <= shape.newest_us <= tomorrow_us:
        newest_at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=shape.newest_us)
        odd_remarks.append(
            f"the newest time is {newest_at:%Y-%m-%d}: times are read as seconds since 1970, or as dates; are they in "
            "another unit?"
        )
    if shape.early and shape.newest_us >= OLDEST_US:
        odd_remarks.append(
            f"{shape.early:,} of {shape.rows:,} rows have a time before 1980, others a later one: is it in another "
            "unit, or does it stand for none?"
        )
    if 0 < shape.untimed < shape.rows:
        untimed_share = shape.untimed / shape.rows
        rows = (
            f"{untimed_share:.0%} of the"
            if untimed_share >= 0.01
            else f"{shape.untimed:,} of {shape.rows:,}"
        )
        odd_remarks.append(
            f"{rows} rows have no time, and count as the oldest of all, before any cut: fill the times in"
        )
    return odd_remarks


def swapped_in_words(batches: Sequence[Interactions]) -> list[str]:
    """Return a remark if most items are users, too, as if the columns were swapped below some row; else none.

    Ids of digits alone are not compared: users and items are both counted from 1 often enough.
    """
    users, items = (
        pa.chunked_array([ids.names for ids in columns], pa.string()).unique()
        for columns in zip(*((batch.users, batch.items) for batch in batches), strict=True)
    )
    items = items.filter(pc.invert(pc.match_substring_regex(items, r"^\d+$")))
    both = pc.sum(pc.is_in(items, value_set=users)).as_py() or 0
    if len(items) < FEW_ITEMS or both <= SWAPPED_SHARE * len(items):
        return []
    remark = (
        f"{both:,} of {len(items):,} items are users, too: are the columns of users and items swapped in a file, or "
        "below some row?"
    )
    return [remark]


def unknown_item_share(interactions: int, unknown: int, event_rows: int) -> float | None:
    """Return the share of the team's interactions whose item the catalogue lacks, at least; None for too few rows.

    All `event_rows` count as unknown: any caller may send events, which may not make the share larger.
    """
    rows = interactions - event_rows
    return None if rows < JUDGED_ROWS else max(0, unknown - event_rows) / rows


def catalogue_in_words(sources: Sources) -> str:
    """Name the table, or the model, whose items a night knows."""
    table = sources.item_features or sources.item_vectors
    return f"the catalogue ({table})" if table else "the model"


def unanswered_in_words(items: int, without: int, table: str) -> list[str]:
    """Return a remark on items of a table that the model cannot answer for; none for a usual share."""
    count = items + without
    if count < JUDGED_ROWS or without < UNKNOWN_SHARE * count:
        return []
    remark = (
        f"{without:,} of the {count:,} items of {table} are left out, since the model has no vector for them. Are "
        "their ids in the form of the model's?"
    )
    return [remark]


def unknown_in_words(
    share: float | None, kind: str, table: str, unknown: Sequence[str], known: Sequence[str]
) -> list[str]:
    """Return a remark on interactions whose ids a table lacks, with examples of both; none for a usual share."""
    if share is None or share < UNKNOWN_SHARE:
        return []
    examples = ""
    if unknown and known:
        interactions_text, table_text = (" and ".join(map(repr, ids)) for ids in (unknown, known))
        examples = f": interactions have {interactions_text}, {table} has {table_text}"
    remark = (
        f"{share:.0%} of the interactions name {kind}s that {table} does not have{examples}; they count for nothing. "
        f"Are the ids of both in one form? See `[sources] {kind}_column`"
    )
    return [remark]


def few_in_words(users: int, items: int | None) -> str | None:
    """Return a remark if gates' measures vary by chance for so few users or items; None if there are enough.

    `items` is None if none are recommended: those of a classifier are its labels.
    """
    if users >= FEW_USERS and (items is None or items >= FEW_ITEMS):
        return None
    least = f"{FEW_USERS} users" if items is None else f"{FEW_USERS} users and {FEW_ITEMS} items"
    return f"too little data to judge by: {_numbers(users, items)}; shares of them vary by chance below about {least}"


def demand_least(users: int, items: int) -> None:
    """Raise SourceError for fewer users or items than a night needs."""
    if users < LEAST_USERS or items < LEAST_ITEMS:
        raise SourceError(
            f"too little data: {_numbers(users, items)}; at least {LEAST_USERS} users and {LEAST_ITEMS} items are "
            f"needed, and lists say something from about {FEW_USERS} users and {FEW_ITEMS} items on",
            users=users,
            items=items,
        )


def demand_several_items(
    user_rows: NDArray[Any], user_count: int, item_rows: NDArray[Any], item_count: int
) -> None:
    """Raise SourceError if each user has one item, so that a model without categories has nothing to learn."""
    last_item = np.empty(user_count, np.int64)
    last_item[user_rows] = item_rows
    if (last_item[user_rows] == item_rows).all():
        raise SourceError(
            f"too little data: each of the {user_count:,} users has one item, so no item is like another; at least "
            f"{LEAST_USERS} users need {LEAST_ITEMS} items or more. Is the right column named for users?",
            users=user_count,
            items=item_count,
        )


def demand_times(sources: Sources, files: Sequence[SourceFile], data_until: str | None) -> None:
    """Raise ConfigError for a chosen cut if the interactions have no column of times."""
    if not files or data_until is None:
        return
    name = sources.timestamp_column
    if name and {name, name.strip(BLANKS)} & {*(column_names(files[0], sources) or ())}:
        return
    raise ConfigError(chosen_cut_in_words(data_until))


def chosen_cut_in_words(data_until: str) -> str:
    """Return why a cut is of no use if no interaction has a time."""
    return (
        f"data_until is {data_until}, but no interaction has a time, so nothing would be left out: name the column of "
        "times in [sources] timestamp_column, or leave data_until out"
    )


def _count_early(times: NDArray[np.int64]) -> int:
    return int(((times < EARLY_US) & (times != 0)).sum())


def _newest_us(times: NDArray[np.int64]) -> int:
    return int(times[times != 0].max(initial=_NO_TIME_US))


def _numbers(users: int, items: int | None) -> str:
    users_text = f"{users:,} user{'s' * (users != 1)}"
    return users_text if items is None else f"{users_text} and {items:,} item{'s' * (items != 1)}"


def hold_lists(texts: Any) -> bool:
    """True if most fields of an id column seem to hold several ids: several words, hardly any of them repeated."""
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        return False
    if len(texts) < JUDGED_ROWS:
        return False
    several = texts.filter(pc.match_substring_regex(texts, _SEVERAL_WORDS))
    if len(several) < LISTS_SHARE * len(texts):
        return False
    return bool(pc.count_distinct(several).as_py() >= ONCE_SHARE * len(several))


def first_rows_in_words(
    sources: Sources, base: Path, reported_reasons: Collection[str] = (HEADER,)
) -> list[str]:
    """Describe how a night treats the first rows: refuses them, leaves some out, or how it reads them.

    Empty if it reads them all unchanged. Reasons in `reported_reasons` are left out.
    """
    unusable, odd = UnusableRows(), list[str]()
    try:
        with closing(read_interactions(sources, base, unusable=unusable)) as read:
            for rows in islice(read, 1):
                shape = Shape.of_batch(rows)
                # Lists in fields were told by the look at the columns already.
                odd = [] if shape.holds_lists else [*odd_in_words(shape), *swapped_in_words([rows])]
    except LarderError as error:
        return [f"a night refuses the interactions: {error.message}"]
    nothing_read: SourceReport = {"rows": 0, "left_out": 0, "reasons": {}}
    report = unusable.to_json().get(INTERACTIONS, nothing_read)
    left_out = [
        f"of the first {report['rows']:,} rows, {reason['rows']:,} cannot be used: {reason_text}{remedy(reason_text)}"
        for reason_text, reason in report["reasons"].items()
        if reason_text not in reported_reasons
    ]
    return [*left_out, *unusable.remarks(INTERACTIONS), *odd]
