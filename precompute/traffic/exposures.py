"""Exposure log of nights: one Parquet file for an experiment and hour, each key once for an arm.

A summary file has the counts, and the parts that it is made of: a part counts once, however often this runs.
One at a time: `retire` of the service's own namespace, or the command.
"""

import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache.errors import CorruptArtefact
from cache.store.artefacts import ArtefactStore
from cache.traffic.experiments import EXPERIMENT_NAME_PATTERN, EXPOSURES_FOLDER
from cache.usage.hot_keys import HOUR_S
from precompute.config.settings import NightConfig
from precompute.releases.release_log import Releases
from precompute.sources.erasures import all_erasures

LATE_S = 900.0
"""Seconds after an hour's end in which parts of it may still come; later ones are added to the file."""

SCHEMA = pa.schema([("key", pa.string()), ("arm", pa.string()), ("at", pa.timestamp("ms", tz="UTC"))])  # fmt: skip
_PARTS = f"{EXPOSURES_FOLDER}/parts"
# Whatever else somebody leaves in the folder is no part.
_PART = re.compile(r"([0-9]{1,12})\..*\.json")


@dataclass(slots=True)
class ArmTotals:
    """Totals of one arm: requests, keys written down in each hour, events by name."""

    requests: int = 0
    exposures: int = 0
    feedback: Counter[str] = field(default_factory=Counter)

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add the counts of a part or a summary; raise KeyError, TypeError or ValueError for a malformed one."""
        self.requests += int(counts["requests"])
        self.feedback.update(
            {str(event): int(count) for event, count in counts["feedback"].items()}
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-able counts."""
        return {
            "requests": self.requests,
            "exposures": self.exposures,
            "feedback": dict(sorted(self.feedback.items())),
        }


def gather(
    store: ArtefactStore, *, at: float, erased: Collection[bytes] = (), late_s: float = LATE_S
) -> dict[str, int]:
    """Make files of the parts of all hours that ended `late_s` ago, and remove the parts; how many there were.

    Keys in `erased` are left out. Safe to repeat after a crash at any place.
    """
    files = parts = 0
    names_by_hour = {
        hour: names
        for hour, names in _list_parts_by_hour(store).items()
        if (hour + 1) * HOUR_S + late_s <= at
    }
    for hour, names in names_by_hour.items():
        hour_parts = _read(store, names)
        for experiment in sorted({line["experiment"] for _, lines in hour_parts for line in lines}):
            _merge(store, experiment, hour, hour_parts, erased)
            files += 1
        for name, _ in hour_parts:
            store.delete(f"{_PARTS}/{name}")
        parts += len(hour_parts)
    return {"hours": len(names_by_hour), "files": files, "parts": parts}


def gather_in_night(
    config: NightConfig, releases: Releases, _needed_generations: Collection[str]
) -> dict[str, int]:
    """Write files of the hours that ended; return `exposure_parts` for the step's report."""
    store = config.store()
    return {
        "exposure_parts": gather(store, at=releases.clock(), erased=erased_users(store))["parts"]
    }


def erased_users(store: ArtefactStore) -> frozenset[bytes]:
    """Users that no file may name: those whose erasures are in force."""
    erasures = all_erasures(store)
    return frozenset(
        erasure.raw for erasure in erasures if erasure.is_in_force and erasure.kind == "user"
    )


def totals(store: ArtefactStore, experiment: str) -> dict[str, ArmTotals]:
    """Totals by arm over all hours, those included of which there are parts only; keys of those are counted by part."""
    totals_by_arm: dict[str, ArmTotals] = {}
    folder, merged = f"{EXPOSURES_FOLDER}/{experiment}", set[str]()
    names = [summary_name for summary_name in store.names(folder) if summary_name.endswith(".json")]
    for path, raw in sorted(
        store.read_many([f"{folder}/{summary_name}" for summary_name in names]).items()
    ):
        summary = _document(path, raw)
        merged.update(summary["parts"])
        for arm, arm_counts in summary["arms"].items():
            total = totals_by_arm.setdefault(arm, ArmTotals())
            total.add(arm_counts)
            total.exposures += int(arm_counts["exposures"])
    waiting = [
        name
        for names in _list_parts_by_hour(store).values()
        for name in names
        if name not in merged
    ]
    for _, lines in _read(store, waiting):
        for line in lines:
            if line["experiment"] == experiment:
                total = totals_by_arm.setdefault(line["arm"], ArmTotals())
                total.add(line)
                total.exposures += len(line["exposures"])
    return totals_by_arm


def forget_keys(store: ArtefactStore, keys: Collection[bytes]) -> int:
    """Remove keys from all files and parts; how many of these held one of them."""
    if not keys:
        return 0
    texts, changed_count = {key.decode() for key in keys}, 0
    for experiment in _experiments(store):
        for name in store.names(f"{EXPOSURES_FOLDER}/{experiment}"):
            path = f"{EXPOSURES_FOLDER}/{experiment}/{name}"
            if name.endswith(".parquet") and (raw := store.read(path)) is not None:
                changed_count += _without(store, path, raw, keys)
    for name, lines in _read(
        store, [name for names in _list_parts_by_hour(store).values() for name in names]
    ):
        kept_lines = [
            {**line, "exposures": [pair for pair in line["exposures"] if pair[0] not in texts]}
            for line in lines
        ]
        if kept_lines != lines:
            store.write(f"{_PARTS}/{name}", orjson.dumps({"arms": kept_lines}))
            changed_count += 1
    return changed_count


def _without(store: ArtefactStore, path: str, raw: bytes, keys: Collection[bytes]) -> bool:
    rows = pq.read_table(io.BytesIO(raw))
    remaining_rows = _without_keys(rows, keys)
    if len(remaining_rows) < len(rows):
        store.write(path, _parquet(remaining_rows))
    return len(remaining_rows) < len(rows)


def _merge(
    store: ArtefactStore,
    experiment: str,
    hour: int,
    parts: Iterable[tuple[str, list[dict[str, Any]]]],
    erased: Collection[bytes],
) -> None:
    """Add parts to an experiment's file of an hour, then to its summary: adding to the file twice adds nothing."""
    path = f"{EXPOSURES_FOLDER}/{experiment}/{hour}"
    raw = store.read(f"{path}.json")
    summary = {"parts": [], "arms": {}} if raw is None else _document(f"{path}.json", raw)
    arms: dict[str, ArmTotals] = {}
    for arm, summary_counts in summary["arms"].items():
        arms.setdefault(arm, ArmTotals()).add(summary_counts)
    known_parts, names, tables = set(summary["parts"]), [], []
    for name, lines in parts:
        experiment_lines = [line for line in lines if line["experiment"] == experiment]
        names += [name] if experiment_lines else []
        for line in experiment_lines:
            tables.append(_rows(line["arm"], line["exposures"]))
            if name not in known_parts:
                arms.setdefault(line["arm"], ArmTotals()).add(line)
    rows = _written(store, f"{path}.parquet", tables, erased)
    for value_count in pc.value_counts(rows["arm"]).to_pylist():
        arms.setdefault(value_count["values"], ArmTotals()).exposures = value_count["counts"]
    new_summary = {
        "experiment": experiment,
        "hour": hour,
        "parts": sorted(known_parts.union(names)),
        "arms": {arm: arms[arm].to_json() for arm in sorted(arms)},
    }
    store.write(f"{path}.json", orjson.dumps(new_summary, option=orjson.OPT_APPEND_NEWLINE))


def _rows(arm: str, exposures: Iterable[tuple[str, float]]) -> pa.Table:
    pairs = list(exposures)
    at_ms = pa.array([round(at * 1000) for _, at in pairs], pa.int64())
    columns = {
        "key": pa.array([key for key, _ in pairs], pa.string()),
        "arm": pa.array([arm] * len(pairs), pa.string()),
        "at": at_ms.cast(SCHEMA.field("at").type),
    }
    return pa.table(columns, schema=SCHEMA)


def _written(
    store: ArtefactStore, path: str, tables: list[pa.Table], erased: Collection[bytes]
) -> pa.Table:
    """The rows of an hour's file with these among them, written; by arm and key, each once, at its first time."""
    raw = store.read(path)
    existing_rows = (
        SCHEMA.empty_table() if raw is None else pq.read_table(io.BytesIO(raw), schema=SCHEMA)
    )
    grouped = pa.concat_tables([existing_rows, *tables]).group_by(["arm", "key"])
    rows = grouped.aggregate([("at", "min")]).rename_columns(["arm", "key", "at"])
    rows = _without_keys(rows.select(SCHEMA.names), erased).sort_by(
        [("arm", "ascending"), ("key", "ascending")]
    )
    if len(rows) or raw is not None:
        store.write(path, _parquet(rows))
    return rows


def _without_keys(rows: pa.Table, without: Collection[bytes]) -> pa.Table:
    """Return the rows without the rows of these keys."""
    texts = pa.array(sorted(key.decode() for key in without), pa.string())
    return rows.filter(pc.invert(pc.is_in(rows["key"], value_set=texts)))


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _experiments(store: ArtefactStore) -> list[str]:
    return [
        experiment
        for experiment in store.names(EXPOSURES_FOLDER)
        if experiment != "parts" and EXPERIMENT_NAME_PATTERN.fullmatch(experiment)
    ]


def _list_parts_by_hour(store: ArtefactStore) -> dict[int, list[str]]:
    """Names of the parts of each hour, in order."""
    hours: dict[int, list[str]] = {}
    for name in store.names(_PARTS):
        if name_match := _PART.fullmatch(name):
            hours.setdefault(int(name_match[1]), []).append(name)
    return dict(sorted(hours.items()))


def _read(store: ArtefactStore, names: Iterable[str]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Parts by name, each with the lines of its arms."""
    paths = {f"{_PARTS}/{name}": name for name in names}
    raw_by_path = store.read_many(list(paths))
    return [
        (paths[path], _document(path, raw)["arms"]) for path, raw in sorted(raw_by_path.items())
    ]


def _document(path: str, raw: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(raw)
        if not isinstance(document, dict) or "arms" not in document:
            raise TypeError("it has no arms")
    except (orjson.JSONDecodeError, TypeError) as error:
        raise CorruptArtefact(
            f"{path} is no part of the exposure log ({error}): put it back from a copy of the store, or remove it",
            path=path,
        ) from error
    return document
