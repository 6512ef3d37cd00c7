"""Rows that cannot be used and are left out of the night: counted by reason, with a few cases of each."""

from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Lock
from typing import Any, Final, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from cache.errors import SourceError

CASES: Final = 10
"""Maximum number of cases shown of each reason."""
EVENTS: Final = "events"
"""Prefix of sources whose values events set: any caller can send these, so they refuse no night."""
ALL_IDS: Final = "ids"
"""Source of remarks on the ids of all sources together."""
TEXT_MAX: Final = 256
"""Characters of an id that are shown: the whole id, so that an erased one is found."""

NO_ID = "no id"
LENGTH = "an id of 0 or more than 256 bytes"
NOT_UTF_8 = "an id that is not UTF-8"
NO_TIME = "no time"
NOT_A_TIME = "no time that can be read"
BEYOND = "a time out of range"
NOT_A_NUMBER = "a weight that is no number"
NO_VALUE = "no value"
NOT_FINITE = "a number that is not finite"
UNFIT = "a number that does not fit its table's precision (store it as f4)"
COLUMNS = "more or fewer columns than the header"
HEADER = "the header again"
BREAK = "an id with a line break"
LISTED_BEFORE = "listed before"
TOO_LONG = "a text longer than feature_text_bytes"

_SECONDS = (
    "times are a timestamp type, ISO 8601 texts, or numbers of seconds since 1970 up to the year 2200; divide "
    "milliseconds by 1,000 and microseconds by 1,000,000; dates such as 20231114 are read where the column holds no "
    "seconds"
)
_REMEDIES: Final = {
    NO_ID: "an empty id is none, nor is a word that programs write for nothing, such as NULL, \\N, NaN or None: "
    "fill them in, or name another column in [sources]",
    LENGTH: "an id has 1 to 256 bytes: fill empty ones in, and shorten long ones, e.g. to a hash",
    COLUMNS: "a row has as many fields as the header: a separator at its end makes one more; a field that holds the "
    'separator stands between quotes; if quotes do not enclose values, set [sources] quote = ""',
    BREAK: 'is a quote not closed? If quotes do not enclose values, set [sources] quote = ""',
    NOT_UTF_8: "convert the file, e.g. with iconv -t utf-8",
    NO_TIME: "fill them in, or name another column in sources.timestamp_column",
    NOT_A_TIME: _SECONDS,
    BEYOND: _SECONDS,
    TOO_LONG: "shorten it, or raise feature_text_bytes, for nights and the service alike",
    NOT_A_NUMBER: "weights are numbers, with a point before their fraction: if it is no weight, name another column in "
    "sources.weight_column",
}

UNKNOWN_NAMED: Final = "unknown_items_named"
"""Field of reports and fact of a generation: items that the catalogue lacks, and that a remark names."""

Case = Mapping[str, str | None]
"""Fields that identify a row, as far as known: `user`, `item`, `file`, `line`."""


class ReasonReport(TypedDict):
    """Rows of a source that cannot be used for one reason, and some of them."""

    rows: int
    cases: list[dict[str, str | None]]


class SourceReport(TypedDict):
    """Rows of a source that were checked, and those left out, by reason; `remarks` on how they were read.

    `named` are the ids that remarks name.
    """

    rows: int
    left_out: int
    reasons: dict[str, ReasonReport]
    remarks: NotRequired[list[str]]
    named: NotRequired[list[str]]


UnusableReport = dict[str, SourceReport]
"""Rows by source (or table), in reports and the manifest."""


class UnusableRows:
    """Counts of checked and unusable rows, by source (or table) and reason; thread-safe.

    Cases with one of the `hidden` ids are counted, not named.
    """

    def __init__(self, hidden: Collection[bytes] = ()) -> None:
        self.hidden = frozenset(raw.decode() for raw in hidden)
        """Ids that neither a case nor a remark may name."""
        self._rows: dict[str, int] = {}
        self._reasons: dict[str, dict[str, ReasonReport]] = {}
        self._remarks: dict[str, list[str]] = {}
        self._named: dict[str, set[str]] = {}
        self._lock = Lock()

    def looked_at(self, source: str, rows: int) -> None:
        """Count rows of a source that were checked, usable or not."""
        with self._lock:
            self._rows[source] = self._rows.get(source, 0) + rows

    def note(self, source: str, reason: str, rows: int, cases: Iterable[Case]) -> None:
        """Counts rows of a source that cannot be used for this reason; `cases` name some of them."""
        with self._lock:
            of_reason = self._reasons.setdefault(source, {})
            reason_report = of_reason.setdefault(reason, {"rows": 0, "cases": []})
            reason_report["rows"] += rows
            for case in cases:
                if len(reason_report["cases"]) < CASES and not self.hidden & set(case.values()):
                    reason_report["cases"].append(dict(case))

    def note_rows(
        self,
        source: str,
        bad_mask_by_reason: Mapping[str, NDArray[np.bool_]],
        case: Callable[[int], Case],
        of_events: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.bool_]:
        """Note masks by reason, each row under its first; return the mask of all bad rows.

        Bad rows in `of_events` are counted as checked, and left out, under events.
        """
        if of_events is not None:
            theirs = {
                bad_reason: rows & of_events for bad_reason, rows in bad_mask_by_reason.items()
            }
            is_bad_event = self.note_rows(f"{EVENTS}.{source}", theirs, case)
            if is_bad_event.any():
                self.looked_at(f"{EVENTS}.{source}", int(is_bad_event.sum()))
            non_event_mask_by_reason = {
                bad_reason: rows & ~of_events for bad_reason, rows in bad_mask_by_reason.items()
            }
            return is_bad_event | self.note_rows(source, non_event_mask_by_reason, case)
        is_noted = np.zeros(len(next(iter(bad_mask_by_reason.values()))), np.bool_)
        for reason, rows in bad_mask_by_reason.items():
            mine = np.flatnonzero(rows & ~is_noted)
            if len(mine):
                self.note(source, reason, len(mine), map(case, mine[: 2 * CASES].tolist()))
            is_noted |= rows
        return is_noted

    def take_in(self, report: UnusableReport) -> None:
        """Add the counts of a `to_json` report."""
        for source, source_report in report.items():
            self.looked_at(source, source_report["rows"])
            for text in source_report.get("remarks", ()):
                self.remark(source, text, source_report.get("named", ()))
            for reason, reason_report in source_report["reasons"].items():
                self.note(source, reason, reason_report["rows"], reason_report["cases"])

    def remark(self, source: str, text: str, named: Iterable[str] = ()) -> None:
        """Notes a sentence on how the rows of a source were read, each once, and the ids that it names."""
        with self._lock:
            self._named.setdefault(source, set()).update(named)
            texts = self._remarks.setdefault(source, [])
            if text not in texts:
                texts.append(text)

    def remarks(self, source: str) -> list[str]:
        """Sentences on how the rows of a source were read."""
        return list(self._remarks.get(source, ()))

    def all_remarks(self) -> list[str]:
        """Sentences on how the rows of all sources were read."""
        return [text for source in sorted(self._remarks) for text in self._remarks[source]]

    def left_out(self, source: str) -> int:
        """Number of rows of a source that were noted."""
        return sum(
            reason_report["rows"] for reason_report in self._reasons.get(source, {}).values()
        )

    def demand_some(self, source: str, where: str) -> None:
        """Raises SourceError where there are rows and not one of them can be used."""
        rows = self._rows.get(source, 0)
        if not rows or self.left_out(source) < rows:
            return
        reasons_text = "; ".join(
            f"{reason} ({reason_report['rows']:,}{_format_example(reason_report['cases'])}){remedy(reason)}"
            for reason, reason_report in self._reasons[source].items()
        )
        raise SourceError(
            f"none of the {rows:,} rows of {where} can be used: {reasons_text}", rows=rows
        )

    def to_json(self) -> UnusableReport:
        """Return the counts for reports and the manifest."""
        return {source: self._source_report(source) for source in sorted(self._rows)}

    def _source_report(self, source: str) -> SourceReport:
        report: SourceReport = {
            "rows": self._rows[source],
            "left_out": self.left_out(source),
            "reasons": self._reasons.get(source, {}),
        }
        if remarks := self.remarks(source):
            report["remarks"] = remarks
        if named := sorted(self._named.get(source, ())):
            report["named"] = named
        return report


def merged(reports: Iterable[UnusableReport]) -> UnusableReport:
    """Several `to_json` as one."""
    unusable = UnusableRows()
    for report in reports:
        unusable.take_in(report)
    return unusable.to_json()


def ids_in(report: UnusableReport) -> set[str]:
    """Every id that a `to_json` names."""
    named = {name for source_report in report.values() for name in source_report.get("named", ())}
    return named | {
        str(case[kind])
        for source_report in report.values()
        for reason_report in source_report["reasons"].values()
        for case in reason_report["cases"]
        for kind in ("user", "item")
        if case.get(kind) is not None
    }


def left_out_share(source_report: SourceReport, threshold: float) -> float:
    """Share of a source's rows that are left out; a single one is none, unless the threshold is 0."""
    if source_report["left_out"] <= 1 and threshold > 0:
        return 0.0
    return source_report["left_out"] / max(1, source_report["rows"])


def worst_source(report: Mapping[str, Any], threshold: float) -> tuple[str, float]:
    """Source of a `to_json` of which the largest share is left out, and that share; events judge no night."""
    shares = {
        name: left_out_share(source_report, threshold)
        for name, source_report in report.items()
        if not name.startswith(f"{EVENTS}.") and name != ALL_IDS
    }
    worst = max(shares, key=lambda name: shares[name], default="")
    return worst, shares.get(worst, 0.0)


def format_case_value(value: Any) -> str | None:
    """A value as a case shows it: text, at most TEXT_MAX characters of it."""
    if value is None:
        return None
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}..."


def _format_example(cases: list[dict[str, str | None]]) -> str:
    named = [
        f"{key} {value!r}"
        for key, value in (cases[0] if cases else {}).items()
        if value is not None
    ]
    return f", e.g. {', '.join(named)}" if named else ""


def remedy(reason: str) -> str:
    """Remedy for a reason, in brackets, empty if none is known; reasons of a column are `column: reason`."""
    remedy_text = _REMEDIES.get(reason.rpartition(": ")[2])
    return f" [{remedy_text}]" if remedy_text else ""
