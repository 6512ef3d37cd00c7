"""Rows that cannot be used and are left out of the night: counted by reason, with a few cases of each."""

from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Lock
from typing import Any, Final, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from cache.errors import SourceError

CASES_MAX: Final = 10
"""Most cases shown for each reason."""
EVENTS_SOURCE_PREFIX: Final = "events"
"""Prefix of sources for values that events set: any caller can send these, so they never refuse a night."""
ALL_IDS_SOURCE: Final = "ids"
"""Source of remarks on the ids of all sources together."""
SHOWN_CHARACTERS_MAX: Final = 256
"""Most characters of an id that are shown: enough for a whole id, so that erased ids can be found in reports."""

NO_ID_REASON = "no id"
ID_LENGTH_REASON = "an id of 0 or more than 256 bytes"
NOT_UTF_8_REASON = "an id that is not UTF-8"
NO_TIME_REASON = "no time"
NOT_A_TIME_REASON = "no time that can be read"
TIME_RANGE_REASON = "a time out of range"
NOT_A_NUMBER_REASON = "a weight that is no number"
NO_VALUE_REASON = "no value"
NOT_FINITE_REASON = "a number that is not finite"
PRECISION_REASON = "a number that does not fit its table's precision (store it as f4)"
FIELD_COUNT_REASON = "more or fewer columns than the header"
HEADER_REASON = "the header again"
LINE_BREAK_REASON = "an id with a line break"
LISTED_BEFORE_REASON = "listed before"
TEXT_TOO_LONG_REASON = "a text longer than feature_text_bytes"

_TIME_REMEDY = (
    "times are a timestamp type, ISO 8601 texts, or numbers of seconds since 1970 up to the year 2200; divide "
    "milliseconds by 1,000 and microseconds by 1,000,000; dates such as 20231114 are read if the column has no "
    "seconds"
)
_REMEDY_BY_REASON: Final = {
    NO_ID_REASON: "empty ids, and words for a missing value such as NULL, \\N, NaN or None, are not ids: "
    "fill them in, or name another column in [sources]",
    ID_LENGTH_REASON: "an id has 1 to 256 bytes: fill in empty ones, and shorten long ones, e.g. to a hash",
    FIELD_COUNT_REASON: "a row has as many fields as the header: a separator at its end makes one more; a field "
    "that holds the "
    'separator must be quoted; if quotes do not enclose values, set [sources] quote = ""',
    LINE_BREAK_REASON: 'is a quote not closed? If quotes do not enclose values, set [sources] quote = ""',
    NOT_UTF_8_REASON: "convert the file, e.g. with iconv -t utf-8",
    NO_TIME_REASON: "fill them in, or name another column in sources.timestamp_column",
    NOT_A_TIME_REASON: _TIME_REMEDY,
    TIME_RANGE_REASON: _TIME_REMEDY,
    TEXT_TOO_LONG_REASON: "shorten it, or raise feature_text_bytes, for nights and the service alike",
    NOT_A_NUMBER_REASON: "weights are numbers, with a decimal point: if it is not a weight, name "
    "another column in "
    "sources.weight_column",
}

UNKNOWN_ITEMS_NAMED_FIELD: Final = "unknown_items_named"
"""Field of reports and of a generation's facts: unknown items that a remark names."""

RowCase = Mapping[str, str | None]
"""Fields that identify a row, as far as known: `user`, `item`, `file`, `line`."""


class ReasonReport(TypedDict):
    """Count of a source's rows that cannot be used for one reason, and some cases."""

    rows: int
    cases: list[dict[str, str | None]]


class SourceReport(TypedDict):
    """Counts of a source's rows: checked, left out, and by reason; `remarks` on how they were read.

    `named` are the ids in the remarks.
    """

    rows: int
    left_out: int
    reasons: dict[str, ReasonReport]
    remarks: NotRequired[list[str]]
    named: NotRequired[list[str]]


UnusableReport = dict[str, SourceReport]
"""Counts of rows by source (or table), in reports and the manifest."""


class UnusableRows:
    """Counts of checked and unusable rows, by source (or table) and reason; thread-safe.

    Cases with an id in `hidden_ids` are counted but not named.
    """

    def __init__(self, hidden_ids: Collection[bytes] = ()) -> None:
        self.hidden = frozenset(raw_id.decode() for raw_id in hidden_ids)
        """Ids that neither a case nor a remark may name."""
        self._checked_rows_by_source: dict[str, int] = {}
        self._reasons_by_source: dict[str, dict[str, ReasonReport]] = {}
        self._remarks_by_source: dict[str, list[str]] = {}
        self._remark_ids_by_source: dict[str, set[str]] = {}
        self._lock = Lock()

    def count_checked(self, source_name: str, row_count: int) -> None:
        """Count rows of a source that were checked, usable or not."""
        with self._lock:
            self._checked_rows_by_source[source_name] = self._checked_rows_by_source.get(source_name, 0) + row_count

    def note(self, source_name: str, reason: str, row_count: int, example_cases: Iterable[RowCase]) -> None:
        """Count rows of a source that cannot be used for this reason; `example_cases` name some of them."""
        with self._lock:
            report_by_reason = self._reasons_by_source.setdefault(source_name, {})
            reason_report = report_by_reason.setdefault(reason, {"rows": 0, "cases": []})
            reason_report["rows"] += row_count
            for case in example_cases:
                if len(reason_report["cases"]) < CASES_MAX and not self.hidden & set(case.values()):
                    reason_report["cases"].append(dict(case))

    def note_rows(
        self,
        source_name: str,
        bad_mask_by_reason: Mapping[str, NDArray[np.bool_]],
        describe_row: Callable[[int], RowCase],
        is_event_row: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.bool_]:
        """Note masks by reason, each row under its first reason; return the mask of all bad rows.

        Bad rows in `is_event_row` are counted under the events' source, as checked and as left out.
        """
        if is_event_row is not None:
            event_mask_by_reason = {bad_reason: rows & is_event_row for bad_reason, rows in bad_mask_by_reason.items()}
            is_bad_event = self.note_rows(f"{EVENTS_SOURCE_PREFIX}.{source_name}", event_mask_by_reason, describe_row)
            if is_bad_event.any():
                self.count_checked(f"{EVENTS_SOURCE_PREFIX}.{source_name}", int(is_bad_event.sum()))
            non_event_mask_by_reason = {
                bad_reason: rows & ~is_event_row for bad_reason, rows in bad_mask_by_reason.items()
            }
            return is_bad_event | self.note_rows(source_name, non_event_mask_by_reason, describe_row)
        is_noted = np.zeros(len(next(iter(bad_mask_by_reason.values()))), np.bool_)
        for reason, bad_mask in bad_mask_by_reason.items():
            newly_bad_rows = np.flatnonzero(bad_mask & ~is_noted)
            if len(newly_bad_rows):
                self.note(
                    source_name,
                    reason,
                    len(newly_bad_rows),
                    map(describe_row, newly_bad_rows[: 2 * CASES_MAX].tolist()),
                )
            is_noted |= bad_mask
        return is_noted

    def add_report(self, report: UnusableReport) -> None:
        """Add the counts of a report from `to_json`."""
        for source_name, source_report in report.items():
            self.count_checked(source_name, source_report["rows"])
            for remark_text in source_report.get("remarks", ()):
                self.remark(source_name, remark_text, source_report.get("named", ()))
            for reason, reason_report in source_report["reasons"].items():
                self.note(source_name, reason, reason_report["rows"], reason_report["cases"])

    def remark(self, source_name: str, remark_text: str, named_ids: Iterable[str] = ()) -> None:
        """Add a sentence on how a source's rows were read, once, with the ids that it names."""
        with self._lock:
            self._remark_ids_by_source.setdefault(source_name, set()).update(named_ids)
            source_remarks = self._remarks_by_source.setdefault(source_name, [])
            if remark_text not in source_remarks:
                source_remarks.append(remark_text)

    def remarks(self, source_name: str) -> list[str]:
        """Return the remarks on how the rows of a source were read."""
        return list(self._remarks_by_source.get(source_name, ()))

    def remarks_of_all(self) -> list[str]:
        """Return the remarks on how the rows of all sources were read."""
        return [text for source in sorted(self._remarks_by_source) for text in self._remarks_by_source[source]]

    def left_out(self, source_name: str) -> int:
        """Return the number of unusable rows of a source."""
        return sum(reason_report["rows"] for reason_report in self._reasons_by_source.get(source_name, {}).values())

    def demand_some(self, source_name: str, files_text: str) -> None:
        """Raise SourceError if rows were checked and none of them can be used."""
        checked_rows = self._checked_rows_by_source.get(source_name, 0)
        if not checked_rows or self.left_out(source_name) < checked_rows:
            return
        reasons_text = "; ".join(
            f"{reason} ({reason_report['rows']:,}{_format_example(reason_report['cases'])}){remedy(reason)}"
            for reason, reason_report in self._reasons_by_source[source_name].items()
        )
        raise SourceError(
            f"none of the {checked_rows:,} rows of {files_text} can be used: {reasons_text}", rows=checked_rows
        )

    def to_json(self) -> UnusableReport:
        """Return the counts for reports and the manifest."""
        return {source: self._source_report(source) for source in sorted(self._checked_rows_by_source)}

    def _source_report(self, source_name: str) -> SourceReport:
        report: SourceReport = {
            "rows": self._checked_rows_by_source[source_name],
            "left_out": self.left_out(source_name),
            "reasons": self._reasons_by_source.get(source_name, {}),
        }
        if remarks := self.remarks(source_name):
            report["remarks"] = remarks
        if named_ids := sorted(self._remark_ids_by_source.get(source_name, ())):
            report["named"] = named_ids
        return report


def merge_reports(reports: Iterable[UnusableReport]) -> UnusableReport:
    """Merge several reports from `to_json`."""
    unusable = UnusableRows()
    for report in reports:
        unusable.add_report(report)
    return unusable.to_json()


def ids_named_in(report: UnusableReport) -> set[str]:
    """Return all ids that a report from `to_json` names."""
    remark_ids = {name for source_report in report.values() for name in source_report.get("named", ())}
    return remark_ids | {
        str(case[entity_kind])
        for source_report in report.values()
        for reason_report in source_report["reasons"].values()
        for case in reason_report["cases"]
        for entity_kind in ("user", "item")
        if case.get(entity_kind) is not None
    }


def left_out_share(source_report: SourceReport, threshold: float) -> float:
    """Return the share of a source's rows that are left out; 0 for a single row, unless the threshold is 0."""
    if source_report["left_out"] <= 1 and threshold > 0:
        return 0.0
    return source_report["left_out"] / max(1, source_report["rows"])


def find_worst_source(report: Mapping[str, Any], threshold: float) -> tuple[str, float]:
    """Return (name, share) of the source with the largest share left out; events never judge a night."""
    share_by_source = {
        name: left_out_share(source_report, threshold)
        for name, source_report in report.items()
        if not name.startswith(f"{EVENTS_SOURCE_PREFIX}.") and name != ALL_IDS_SOURCE
    }
    worst_name = max(share_by_source, key=lambda name: share_by_source[name], default="")
    return worst_name, share_by_source.get(worst_name, 0.0)


def format_case_value(case_value: Any) -> str | None:
    """Return a value as cases show it: a text of at most SHOWN_CHARACTERS_MAX characters, longer ones shortened."""
    if case_value is None:
        return None
    text = case_value.decode(errors="backslashreplace") if isinstance(case_value, bytes) else str(case_value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."


def _format_example(example_cases: list[dict[str, str | None]]) -> str:
    field_texts = [
        f"{key} {value!r}" for key, value in (example_cases[0] if example_cases else {}).items() if value is not None
    ]
    return f", e.g. {', '.join(field_texts)}" if field_texts else ""


def remedy(reason: str) -> str:
    """Return the remedy for a reason in brackets, empty if none is known; a column's reason is `column: reason`."""
    remedy_text = _REMEDY_BY_REASON.get(reason.rpartition(": ")[2])
    return f" [{remedy_text}]" if remedy_text else ""
