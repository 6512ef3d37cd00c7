"""Reads what all workers told Redis, adds it up, and remembers of old bins only what is drawn."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash

from cache.errors import TierUnavailable
from cache.l2.control_plane import ControlPlane
from serving.dashboard.counters import Counts, is_count, merged, unpack
from serving.dashboard.publisher import MetricsPublisher
from serving.dashboard.series import DrawnBin, row
from serving.dashboard.time_bins import BIN_S, BINS_MAX, start_of
from serving.events import overview
from serving.usage.l1_curve import merge_curves

LATELY_BINS = 30
"""Bins of the last five minutes: what is said of the present is said of these."""
_FRESH_BINS = 6
_ALL_AGAIN_S = 60.0
"""Seconds between two readings of all bins: older than a minute they hardly change, and late tellings are seen then."""
_PIECE = 64
TIMEOUT_S = 2.0
SILENT_S = 10.0
"""Seconds without a telling after which a worker is not shown."""


_TEXTS = ("generation", "stale", "degraded", "failed")
_NUMBERS = (
    "since", "epoch", "live_queued", "under_way", "requests_max", "queue_seconds",
    "l1_bytes", "l1_budget_bytes", "l1_entries",
)  # fmt: skip
"""Fields of a worker's row, by kind."""


@dataclass(frozen=True, slots=True)
class FleetReading:
    """All that is known now; `trouble`: why it is this worker alone. `lately` has the newest bins undrawn."""

    read_at: float
    trouble: str | None
    workers: Mapping[str, Mapping[str, Any]]
    rows: Mapping[int, DrawnBin]
    lately: Mapping[int, Counts]
    registry: Mapping[str, Mapping[str, Any]] | None = None
    infos: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True)
class _DrawnBins:
    """Bins as they were last drawn; `tokens` tell whether the blobs are still the same."""

    bounds: Sequence[float]
    tokens: dict[int, int] = field(default_factory=dict)
    rows: dict[int, DrawnBin] = field(default_factory=dict)
    lately: dict[int, Counts] = field(default_factory=dict)

    def merge_bins(
        self, bins: Mapping[int, Sequence[bytes]], oldest: int, newest_start: int
    ) -> None:
        """Adds up what each bin holds, unless it is as before."""
        for start, blobs in bins.items():
            is_late = start > newest_start - LATELY_BINS * BIN_S
            token = xxhash.xxh3_64_intdigest(b"".join(sorted(blobs)))
            if self.tokens.get(start) == token and (start in self.lately or not is_late):
                continue
            counts = merged(map(unpack, blobs))
            self.tokens[start], self.rows[start] = token, row(counts, self.bounds)
            if is_late:
                self.lately[start] = counts
        for entries_by_start, first_start in (
            (self.tokens, oldest),
            (self.rows, oldest),
            (self.lately, newest_start - LATELY_BINS * BIN_S + 1),
        ):
            for start in [
                bin_start
                for bin_start in entries_by_start
                if not first_start <= bin_start <= newest_start
            ]:
                del entries_by_start[start]


class FleetView:
    """Reader of all workers' counts, one per worker; `read` is for one caller at a time."""

    def __init__(
        self,
        control: ControlPlane,
        teller: MetricsPublisher,
        bounds: Sequence[float],
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control, self._keys, self._publisher = control, control.keyspace, teller
        self._clock, self._timer = clock, timer
        self._drawn = _DrawnBins(bounds)
        self._alone = _DrawnBins(bounds)
        self._all_at: float | None = None

    async def read(self) -> FleetReading:
        """All that Redis has, with this worker's own as it is now; without Redis this worker's own."""
        own_row = self._publisher.note()
        now_s = own_row["at"]
        newest_start = start_of(now_s)
        oldest = newest_start - (BINS_MAX - 1) * BIN_S
        try:
            async with asyncio.timeout(TIMEOUT_S):
                workers, registry, bins = await self._read(oldest, newest_start)
                infos = await self._control.infos()
        except (TierUnavailable, TimeoutError) as error:
            self._all_at = None
            mine = {start: [blob] for start, blob in self._publisher.bins.packed.items()}
            await asyncio.to_thread(self._alone.merge_bins, mine, oldest, newest_start)
            trouble = str(error) or f"no reply within {TIMEOUT_S} s"
            shown_workers = {self._publisher.name: own_row}
            return FleetReading(
                now_s, trouble, shown_workers, dict(self._alone.rows), dict(self._alone.lately)
            )
        for start in bins:
            if (blob := self._publisher.bins.packed.get(start)) is not None:
                bins[start][self._publisher.name.encode()] = blob
        blobs = {
            start: list(blob_by_worker.values())
            for start, blob_by_worker in bins.items()
            if blob_by_worker
        }
        await asyncio.to_thread(self._drawn.merge_bins, blobs, oldest, newest_start)
        # Another version may tell less of itself.
        unknown = dict.fromkeys(own_row)
        shown_workers = {
            name: unknown | worker_row
            for name, worker_row in _rows(workers).items()
            if now_s - worker_row["at"] < SILENT_S and _can_be_shown(worker_row)
        } | {self._publisher.name: own_row}
        return FleetReading(
            now_s, self._publisher.trouble, shown_workers, dict(self._drawn.rows), dict(self._drawn.lately),
            _rows(registry), infos,
        )  # fmt: skip

    async def _read(
        self, oldest: int, newest_start: int
    ) -> tuple[dict[bytes, bytes], dict[bytes, bytes], dict[int, dict[bytes, bytes]]]:
        """The workers' table, the registry, and the bins that may have changed."""
        at = self._timer()
        is_all = self._all_at is None or at - self._all_at >= _ALL_AGAIN_S
        first = oldest if is_all else newest_start - _FRESH_BINS * BIN_S
        starts = range(first, newest_start + 1, BIN_S)
        tables = [("HGETALL", self._keys.workers), ("HGETALL", self._keys.generations)]
        workers, registry = await self._control.execute_all(tables)
        bins: dict[int, dict[bytes, bytes]] = {}
        for piece in (starts[at : at + _PIECE] for at in range(0, len(starts), _PIECE)):
            commands = [("HGETALL", self._keys.bin(start)) for start in piece]
            bins |= zip(piece, await self._control.execute_all(commands), strict=True)
        if is_all:
            self._all_at = at
        return workers, registry, bins


def _rows(table: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """JSON objects by name; what another version may have written otherwise is left out."""
    row_by_name = {}
    for name, raw in table.items():
        try:
            parsed_row = orjson.loads(raw)
            if isinstance(parsed_row["at"], int | float):
                row_by_name[name.decode(errors="replace")] = parsed_row
        except (ValueError, TypeError, KeyError):
            continue
    return row_by_name


def _can_be_shown(row: Mapping[str, Any]) -> bool:
    """Returns whether the fields that a row has are of their kinds: one of another kind would cost the whole page."""
    counts, events = row.get("counts") or {}, row.get("events") or {}
    return (
        _has_kinds(row, _TEXTS, _NUMBERS)
        and isinstance(counts, dict)
        and all(map(is_count, counts.values()))
        and isinstance(events, dict)
        and _has_kinds(events, overview.TEXTS, overview.NUMBERS)
        and _adds_up(overview.merge_rows, events)
        and _adds_up(merge_curves, row.get("advisor"))
    )


def _has_kinds(row: Mapping[str, Any], texts: Sequence[str], numbers: Sequence[str]) -> bool:
    return all(isinstance(row.get(name), str | None) for name in texts) and all(
        row.get(name) is None or is_count(row[name]) for name in numbers
    )


def _adds_up(add: Callable[[Sequence[Any]], object], row_part: Any) -> bool:
    try:
        add([row_part])
    except Exception:  # whatever it is, nothing can be made of it
        return False
    return True
