"""Plausibility of interactions: figures that `begin` counts once, and remarks on odd ones.

An odd figure refuses no night, since it may be right.
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
from precompute.sources.csv_files import BLANK_CHARACTERS
from precompute.sources.files import SourceFile
from precompute.sources.readers import INTERACTIONS_SOURCE, Interactions, column_names, read_interactions
from precompute.sources.times import MICROSECONDS_PER_SECOND, YEAR_1980_S
from precompute.sources.unusable import HEADER_REASON, SourceReport, UnusableRows, remedy

DAY_S: Final = 86_400
AHEAD_S: Final = 600
"""Seconds by which clocks of hosts may differ; a newer time than that is reported."""

REFUSAL_PREFIX: Final = "a night refuses the interactions"
"""Beginning of the remark on rows that a night refuses."""

JUDGED_ROWS_MIN: Final = 20
"""Rows below which shares of rows are not judged."""

ONE_ID_SHARE_MAX: Final = 0.2
"""Share of all rows that a single user or item rarely has: such an id often stands for a missing one."""

ITEMS_ONCE_SHARE_MAX: Final = 0.9
"""Ratio of distinct items to rows from which on nearly every item occurs once."""

UNKNOWN_IDS_SHARE_MAX: Final = 0.2
"""Share of rows with ids unknown to another table, from which on the ids may differ in form."""

SWAPPED_ITEMS_SHARE_MAX: Final = 0.5
"""Share of items that are also users, from which on columns may be swapped in some rows."""

LIST_FIELDS_SHARE_MAX: Final = 0.5
"""Share of fields with several words, from which on a column may hold lists."""

YEAR_1980_US: Final = YEAR_1980_S * MICROSECONDS_PER_SECOND
"""Times before this one, among later times, indicate another unit or a placeholder for a missing time."""

YEAR_1990_US: Final = int(datetime(1990, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
"""If all times are before this one, their unit is probably wrong."""

GATE_USERS_MIN: Final = 100
GATE_ITEMS_MIN: Final = 20
"""Numbers of users and items below which shares that gates judge vary by chance."""

NIGHT_USERS_MIN: Final = 2
NIGHT_ITEMS_MIN: Final = 2
"""Numbers of users and items below which nothing can be learnt or recommended."""

_SEVERAL_WORDS_PATTERN: Final = r"\S[\s,;|]+\S"

_NO_TIME_US: Final = int(np.iinfo(np.int64).min)
_USER_BUCKET_COUNT: Final = 1024
"""Number of counters of users' rows, by the first bits of the hash: users with many rows rarely share one."""

_BUCKET_SHIFT: Final = np.uint64(64 - 10)


class RowCountsReport(TypedDict):
    """Counts of rows, as in the report of `begin`."""

    user_rows: list[int]
    untimed: int
    newest_us: int
    early: int


@dataclass(slots=True, eq=False)
class RowCounts:
    """Counts of rows of interactions that do not depend on their order, so that counts of two parts can be added."""

    rows_by_user_bucket: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_USER_BUCKET_COUNT, np.int64))
    untimed_row_count: int = 0
    newest_time_us: int = _NO_TIME_US
    row_count_before_1980: int = 0
    """Rows with a time before 1980."""

    @classmethod
    def of_report(cls, report: RowCountsReport) -> Self:
        """Read counts that `to_json` wrote."""
        user_rows = np.array(report["user_rows"], np.int64)
        # Reports written by Larder 0.1 have no count of early times.
        early_count = int(report.get("early", 0))
        return cls(user_rows, int(report["untimed"]), int(report["newest_us"]), early_count)

    def add(self, user_hashes: NDArray[np.uint64], times_us: NDArray[np.int64]) -> None:
        """Add rows: their users' hashes, and times in microseconds since 1970, 0 for none."""
        self.rows_by_user_bucket += np.bincount(
            (user_hashes >> _BUCKET_SHIFT).astype(np.int64), minlength=_USER_BUCKET_COUNT
        )
        self.untimed_row_count += int((times_us == 0).sum())
        self.newest_time_us = max(self.newest_time_us, _newest_us(times_us))
        self.row_count_before_1980 += _count_before_1980(times_us)

    def to_json(self) -> RowCountsReport:
        """Return the counts for a report."""
        return {
            "user_rows": self.rows_by_user_bucket.tolist(),
            "untimed": self.untimed_row_count,
            "newest_us": self.newest_time_us,
            "early": self.row_count_before_1980,
        }


@dataclass(frozen=True, slots=True)
class InteractionFigures:
    """Figures of a table of interactions, for `plausibility_remarks`; reports omit the ids."""

    row_count: int
    user_count: int
    item_count: int
    most_rows_of_user: int
    most_rows_of_item: int
    untimed_row_count: int
    newest_time_us: int
    most_active_user: str | None = None
    most_popular_item: str | None = None
    holds_lists_of_ids: bool = False
    row_count_before_1980: int = 0
    """Rows with a time before 1980."""

    @classmethod
    def of_batch(cls, batch: Interactions) -> Self:
        """Compute the figures of some rows, with the most frequent ids."""
        rows_by_user, rows_by_item = (np.bincount(ids.id_codes) for ids in (batch.user_ids, batch.item_ids))
        return cls(
            row_count=len(batch.times_us),
            user_count=len(rows_by_user),
            item_count=len(rows_by_item),
            most_rows_of_user=int(rows_by_user.max(initial=0)),
            most_rows_of_item=int(rows_by_item.max(initial=0)),
            untimed_row_count=int((batch.times_us == 0).sum()),
            newest_time_us=_newest_us(batch.times_us),
            most_active_user=str(batch.user_ids.distinct_ids[int(rows_by_user.argmax())])
            if len(rows_by_user)
            else None,
            most_popular_item=str(batch.item_ids.distinct_ids[int(rows_by_item.argmax())])
            if len(rows_by_item)
            else None,
            holds_lists_of_ids=has_lists_of_ids(batch.item_ids.row_texts()),
            row_count_before_1980=_count_before_1980(batch.times_us),
        )


def plausibility_remarks(figures: InteractionFigures) -> list[str]:
    """Return remarks on odd figures, each with the figure and a remedy."""
    too_few_remark = few_in_words(figures.user_count, figures.item_count)
    return [too_few_remark, *odd_figures_remarks(figures)] if too_few_remark else odd_figures_remarks(figures)


def odd_figures_remarks(figures: InteractionFigures) -> list[str]:
    """Return the remarks on odd figures, without the one on too few users or items."""
    odd_remarks: list[str] = []
    if figures.row_count < JUDGED_ROWS_MIN:
        return odd_remarks
    for kind, id_count, top_row_count, top_id in (
        ("user", figures.user_count, figures.most_rows_of_user, figures.most_active_user),
        ("item", figures.item_count, figures.most_rows_of_item, figures.most_popular_item),
    ):
        # With few ids, a fifth of the rows is normal.
        if top_row_count >= ONE_ID_SHARE_MAX * figures.row_count and id_count >= 5 / ONE_ID_SHARE_MAX:
            subject = f"the {kind} {top_id!r}" if top_id is not None else f"one {kind}"
            odd_remarks.append(
                f"{subject} has {top_row_count / figures.row_count:.0%} of all rows: if that id is a "
                "placeholder, or stands for "
                "a missing one, leave its rows out"
            )
    if figures.item_count >= ITEMS_ONCE_SHARE_MAX * figures.row_count or figures.holds_lists_of_ids:
        several_words_text = ", and most hold several words" if figures.holds_lists_of_ids else ""
        odd_remarks.append(
            f"{figures.item_count:,} items in {figures.row_count:,} rows: nearly every item occurs "
            f"once{several_words_text}, so "
            "nothing can be "
            "learnt about them. Is the right column named, and does each row have one item of one user?"
        )
    now_us = int(time.time() * MICROSECONDS_PER_SECOND)
    tomorrow_us, ahead_us = now_us + DAY_S * MICROSECONDS_PER_SECOND, figures.newest_time_us - now_us
    if figures.untimed_row_count < figures.row_count and not YEAR_1990_US <= figures.newest_time_us <= tomorrow_us:
        newest_at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=figures.newest_time_us)
        odd_remarks.append(
            f"the newest time is {newest_at:%Y-%m-%d}: times are read as seconds since 1970, or as dates; are these in "
            "another unit?"
        )
    elif ahead_us > AHEAD_S * MICROSECONDS_PER_SECOND:
        newest_at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=figures.newest_time_us)
        odd_remarks.append(
            f"the newest time is {newest_at:%Y-%m-%d %H:%M} UTC, {ahead_us / MICROSECONDS_PER_SECOND / 3600:.1f} h "
            "ahead of this host's clock: are times those of a time zone, but read as UTC? Later nights take such rows "
            "for new"
        )
    if figures.row_count_before_1980 and figures.newest_time_us >= YEAR_1990_US:
        odd_remarks.append(
            f"{figures.row_count_before_1980:,} of {figures.row_count:,} rows have a time before 1980, others "
            "a later one: is it in another "
            "unit, or a placeholder for a missing time?"
        )
    if 0 < figures.untimed_row_count < figures.row_count:
        untimed_share = figures.untimed_row_count / figures.row_count
        untimed_rows_text = (
            f"{untimed_share:.0%} of the"
            if untimed_share >= 0.01
            else f"{figures.untimed_row_count:,} of {figures.row_count:,}"
        )
        odd_remarks.append(
            f"{untimed_rows_text} rows have no time, and count as the oldest of all, before any cut: add their times"
        )
    return odd_remarks


def swapped_columns_remarks(batches: Sequence[Interactions]) -> list[str]:
    """Return a remark if most items are also users, as if the columns were swapped from some row on; else none.

    Ids of digits alone are not compared, since users and items are often both numbered from 1.
    """
    user_ids, item_ids = (
        pa.chunked_array([ids.distinct_ids for ids in column_pair], pa.string()).unique()
        for column_pair in zip(*((batch.user_ids, batch.item_ids) for batch in batches), strict=True)
    )
    item_ids = item_ids.filter(pc.invert(pc.match_substring_regex(item_ids, r"^\d+$")))
    shared_count = pc.sum(pc.is_in(item_ids, value_set=user_ids)).as_py() or 0
    if len(item_ids) < GATE_ITEMS_MIN or shared_count <= SWAPPED_ITEMS_SHARE_MAX * len(item_ids):
        return []
    remark = (
        f"{shared_count:,} of {len(item_ids):,} items are users, too: are the columns of users and items swapped in a "
        "file, or "
        "below some row?"
    )
    return [remark]


def unknown_item_share(interaction_rows: int, unknown_rows: int, event_rows: int) -> float | None:
    """Return a lower bound on the share of source interactions with an unknown item; None for too few rows.

    All `event_rows` count as unknown: any caller may send events, which must not increase the share.
    """
    team_rows = interaction_rows - event_rows
    return None if team_rows < JUDGED_ROWS_MIN else max(0, unknown_rows - event_rows) / team_rows


def catalogue_in_words(sources: Sources) -> str:
    """Name the table, or the model, that defines the items of a night."""
    table = sources.item_features or sources.item_vectors
    return f"the catalogue ({table})" if table else "the model"


def items_without_vector_remarks(kept_item_count: int, left_out_count: int, table_name: str) -> list[str]:
    """Return a remark on a table's items for which the model has no vector; none if they are few."""
    item_count = kept_item_count + left_out_count
    if item_count < JUDGED_ROWS_MIN or left_out_count < UNKNOWN_IDS_SHARE_MAX * item_count:
        return []
    remark = (
        f"{left_out_count:,} of the {item_count:,} items of {table_name} are left out, since the model has no vector "
        "for them. Are "
        "their ids in the same form as the model's?"
    )
    return [remark]


def unknown_ids_remarks(
    unknown_share: float | None, entity_kind: str, table_name: str, unknown_ids: Sequence[str], known_ids: Sequence[str]
) -> list[str]:
    """Return a remark on interactions with ids that a table lacks, with examples of both; none if they are few."""
    if unknown_share is None or unknown_share < UNKNOWN_IDS_SHARE_MAX:
        return []
    examples = ""
    if unknown_ids and known_ids:
        interactions_text, table_text = (" and ".join(map(repr, ids)) for ids in (unknown_ids, known_ids))
        examples = f": interactions have {interactions_text}, {table_name} has {table_text}"
    remark = (
        f"{unknown_share:.0%} of the interactions name {entity_kind}s that {table_name} does not "
        f"have{examples}; they are "
        "ignored. "
        f"Do both use the same form of ids? See `[sources] {entity_kind}_column`"
    )
    return [remark]


def few_in_words(user_count: int, item_count: int | None) -> str | None:
    """Return a remark if there are so few users or items that gates' measures vary by chance; None if there are enough.

    `item_count` is None if no items are recommended: a classifier's items are its labels.
    """
    if user_count >= GATE_USERS_MIN and (item_count is None or item_count >= GATE_ITEMS_MIN):
        return None
    enough_text = (
        f"{GATE_USERS_MIN} users" if item_count is None else f"{GATE_USERS_MIN} users and {GATE_ITEMS_MIN} items"
    )
    return (
        f"too little data to judge by: {_counts_in_words(user_count, item_count)}; shares of them vary by chance below "
        f"about {enough_text}"
    )


def demand_enough_ids(user_count: int, item_count: int) -> None:
    """Raise SourceError for fewer users or items than a night needs."""
    if user_count < NIGHT_USERS_MIN or item_count < NIGHT_ITEMS_MIN:
        raise SourceError(
            f"too little data: {_counts_in_words(user_count, item_count)}; at least {NIGHT_USERS_MIN} users and "
            f"{NIGHT_ITEMS_MIN} items are "
            f"needed, and lists are meaningful from about {GATE_USERS_MIN} users and {GATE_ITEMS_MIN} items on",
            users=user_count,
            items=item_count,
        )


def demand_several_items(
    user_of_row: NDArray[Any], user_count: int, item_of_row: NDArray[Any], item_count: int
) -> None:
    """Raise SourceError if every user has one item, so that a model without categories cannot learn anything."""
    last_item_of_user = np.empty(user_count, np.int64)
    last_item_of_user[user_of_row] = item_of_row
    if (last_item_of_user[user_of_row] == item_of_row).all():
        raise SourceError(
            f"too little data: each of the {user_count:,} users has one item, so no items are similar; at least "
            f"{NIGHT_USERS_MIN} users need {NIGHT_ITEMS_MIN} items or more. Is the right column named for users?",
            users=user_count,
            items=item_count,
        )


def demand_times(sources: Sources, interaction_files: Sequence[SourceFile], data_until: str | None) -> None:
    """Raise ConfigError for a given cut if the interactions have no column of times."""
    if not interaction_files or data_until is None:
        return
    timestamp_column = sources.timestamp_column
    if timestamp_column and {timestamp_column, timestamp_column.strip(BLANK_CHARACTERS)} & {
        *(column_names(interaction_files[0], sources) or ())
    }:
        return
    raise ConfigError(chosen_cut_in_words(data_until))


def chosen_cut_in_words(data_until: str) -> str:
    """Return the reason why a cut has no effect if no interaction has a time."""
    return (
        f"data_until is {data_until}, but no interaction has a time, so nothing would be left out: name the column of "
        "times in [sources] timestamp_column, or remove data_until"
    )


def _count_before_1980(times_us: NDArray[np.int64]) -> int:
    return int(((times_us < YEAR_1980_US) & (times_us != 0)).sum())


def _newest_us(times_us: NDArray[np.int64]) -> int:
    return int(times_us[times_us != 0].max(initial=_NO_TIME_US))


def _counts_in_words(user_count: int, item_count: int | None) -> str:
    users_text = f"{user_count:,} user{'s' * (user_count != 1)}"
    return users_text if item_count is None else f"{users_text} and {item_count:,} item{'s' * (item_count != 1)}"


def has_lists_of_ids(id_texts: Any) -> bool:
    """True if most fields of an id column seem to hold several ids: several words, hardly any field repeated."""
    if not (pa.types.is_string(id_texts.type) or pa.types.is_large_string(id_texts.type)):
        return False
    if len(id_texts) < JUDGED_ROWS_MIN:
        return False
    several_word_texts = id_texts.filter(pc.match_substring_regex(id_texts, _SEVERAL_WORDS_PATTERN))
    if len(several_word_texts) < LIST_FIELDS_SHARE_MAX * len(id_texts):
        return False
    return bool(pc.count_distinct(several_word_texts).as_py() >= ITEMS_ONCE_SHARE_MAX * len(several_word_texts))


def first_rows_remarks(
    sources: Sources, base_folder: Path, reported_reasons: Collection[str] = (HEADER_REASON,)
) -> list[str]:
    """Describe how a night treats the first rows: refuses them, leaves some out, or reads them in a special way.

    Empty if it reads all of them unchanged. Reasons in `reported_reasons` are omitted.
    """
    unusable, odd_remarks = UnusableRows(), list[str]()
    try:
        with closing(read_interactions(sources, base_folder, unusable_rows=unusable)) as batches:
            for first_batch in islice(batches, 1):
                figures = InteractionFigures.of_batch(first_batch)
                # Lists in fields are reported by the check of the columns.
                odd_remarks = (
                    []
                    if figures.holds_lists_of_ids
                    else [*odd_figures_remarks(figures), *swapped_columns_remarks([first_batch])]
                )
    except LarderError as error:
        return [f"{REFUSAL_PREFIX}: {error.message}"]
    nothing_read: SourceReport = {"rows": 0, "left_out": 0, "reasons": {}}
    report = unusable.to_json().get(INTERACTIONS_SOURCE, nothing_read)
    left_out_remarks = [
        f"of the first {report['rows']:,} rows, {reason['rows']:,} cannot be used: {reason_text}{remedy(reason_text)}"
        for reason_text, reason in report["reasons"].items()
        if reason_text not in reported_reasons
    ]
    return [*left_out_remarks, *unusable.remarks(INTERACTIONS_SOURCE), *odd_remarks]
