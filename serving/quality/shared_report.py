"""Quality of all replicas as one whole: each tells Redis its part, and hears the others'."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from cache.control.hot_keys import COLD_WINDOW, Name, hour_of
from cache.errors import TierUnavailable
from cache.l2.control_plane import ControlPlane
from serving.generations.snapshot import Snapshot
from serving.quality.aggregates import Key, SampleTotals, merged
from serving.quality.results import QualityResults
from serving.usage.table_usage import GIGABYTE, TableUsage

LIFE_S = 120
"""Life of the hash in Redis in seconds, from the last report of any replica on."""

FRESH_S = 30.0
"""Age in seconds (plus two report intervals) beyond which a replica's part counts no more."""

_REPORTS_A_COUNT = 6
"""Reports from one count of the worklist to the next: a count takes the event loop 10 ms and more."""


class SharedReport:
    """Shared report; `name` is this replica's, `clock` Redis' own, so that reports of several hosts can be compared."""

    def __init__(
        self,
        control: ControlPlane,
        name: str,
        results: QualityResults,
        usage: TableUsage,
        live: Callable[[], Snapshot | None],
        clock: Callable[[], float],
        every_s: float,
    ) -> None:
        self._control = control
        self._name = name
        self._results = results
        self._usage = usage
        self._live = live
        self._clock = clock
        self._fresh_s = FRESH_S + 2 * every_s
        self._parts: list[dict[str, Any]] = []
        self._worklist: int | None = None
        self._until_count = 0
        """Reports that still go by before the worklist is counted again."""

    async def report(self) -> None:
        """Writes this replica's part and reads the others'; without Redis it forgets theirs and tells only its own."""
        await self._usage.report()
        now_s, send_command, key = (
            self._clock(),
            self._control.execute,
            self._control.keyspace.quality,
        )
        own_part = self._build_own_part(now_s)
        try:
            await send_command("HSET", key, self._name, orjson.dumps(own_part))
            await send_command("EXPIRE", key, LIFE_S)
            parts = {n: _part(raw) for n, raw in dict(await send_command("HGETALL", key)).items()}
            heard = {n: part for n, part in parts.items() if part is not None}
            expired_replicas = [
                n for n, part in heard.items() if now_s - part["at"] > self._fresh_s
            ]
            if expired_replicas:
                await send_command("HDEL", key, *expired_replicas)
            fresh = [part for n, part in heard.items() if n not in expired_replicas]
            await self._count(now_s)
        except TierUnavailable:
            fresh, self._worklist, self._until_count = [], None, 0
        self._parts = [
            replica_part for replica_part in fresh if replica_part["replica"] != self._name
        ]

    async def sign_off(self) -> None:
        """Takes this replica's part back."""
        try:
            await self._control.execute("HDEL", self._control.keyspace.quality, self._name)
        except TierUnavailable:
            return

    def to_json(self) -> dict[str, Any] | None:
        """Quality for the dashboard, as `summary` of this generation's parts; None before there is a generation."""
        if self._results.release is None:
            return None
        parts = [
            replica_part
            for replica_part in self._parts
            if replica_part["generation"] == self._results.release[0]
        ]
        own_part = self._build_own_part(self._clock())
        return summary(
            [own_part, *parts],
            worklist=self._worklist,
            read_share=self._usage.read_share(),
            size_bytes=self._usage.size_bytes(),
        )

    def _build_own_part(self, now_s: float) -> dict[str, Any]:
        hits = sum(self._usage.hits().values())
        return {"replica": self._name, "at": now_s, "hits": hits, **self._results.to_json()}

    async def _count(self, now_s: float) -> None:
        live = self._live()
        if live is None:
            self._worklist = None
            return
        if self._until_count:
            self._until_count -= 1
            return
        self._worklist = len(
            still_cold(
                live, await self._control.fetch_hot_names(hour_of(now_s, COLD_WINDOW), COLD_WINDOW)
            )
        )
        self._until_count = _REPORTS_A_COUNT - 1


def _part(raw: bytes) -> dict[str, Any] | None:
    """Parsed part of a replica; None for what cannot be added to others, which another version may have told."""
    try:
        part: dict[str, Any] = orjson.loads(raw)
        summary([part], worklist=None, read_share=None, size_bytes=1)
        is_sound = isinstance(part["at"], int | float) and {"replica", "generation"} <= part.keys()
        return part if is_sound else None
    except Exception:  # whatever it is: it would cost all replicas this part of the page
        return None


def still_cold(live: Snapshot, names: Sequence[Name]) -> list[Name]:
    """Names that this generation does not know either, of tables that it has."""
    tables = live.manifest.tables
    return [
        (name, raw) for name, raw in names if name in tables and not live.knows(tables[name], raw)
    ]


def summary(
    parts: Sequence[dict[str, Any]],
    *,
    worklist: int | None,
    read_share: float | None,
    size_bytes: int,
) -> dict[str, Any]:
    """Summary of the replicas' parts, which `GET /dashboard/data` calls `quality`."""
    cells = merged(replica_part["cells"] for replica_part in parts)
    total_cell = SampleTotals.of(cell.to_json() for cell in cells.values())
    drift = sorted({table for replica_part in parts for table in replica_part["drift"]})
    gigabytes = size_bytes / GIGABYTE
    return {
        "since": min(replica_part["since"] for replica_part in parts),
        **_figures(total_cell),
        "drift": bool(drift),
        "drifted": drift,
        "sentence": _sentence(total_cell, drift),
        "by": [_row(key, cell) for key, cell in sorted(cells.items())],
        "worklist": worklist,
        "read_share": read_share,
        "hits_per_gb": sum(replica_part["hits"] for replica_part in parts) / gigabytes
        if gigabytes
        else None,
    }


def _row(key: Key, cell: SampleTotals) -> dict[str, Any]:
    table, source, producer, band = key
    return {
        "table": table,
        "source": source,
        "producer": producer,
        "band": band,
        **_figures(cell),
    }


def _figures(cell: SampleTotals) -> dict[str, Any]:
    """Figures of a cell; without samples they are None, since a rate of 0 would be an alarm."""
    is_known = cell.samples > 0
    return {
        "samples": cell.samples,
        "exact": cell.exact_rate() if is_known else None,
        "overlap": cell.mean_overlap() if is_known else None,
        "score_error": cell.mean_error() if is_known else None,
        "age_s": cell.age / cell.samples if is_known else None,
    }


def _sentence(total_cell: SampleTotals, drift: Sequence[str]) -> str:
    if drift:
        return (
            f"Answers of {', '.join(drift)} are not what the model says: roll back, or restore the pages "
            "(`larder restore`) and start the service anew."
        )
    if not total_cell.samples:
        return "No served answer has been computed once more yet."
    exact, overlap = total_cell.exact_rate(), total_cell.mean_overlap()
    return (
        f"Of {total_cell.samples} served answers computed once more {100 * exact['rate']:.1f} % came out the same "
        f"({100 * exact['low']:.1f} to {100 * exact['high']:.1f} %), with {100 * overlap['mean']:.1f} % of the items."
    )
