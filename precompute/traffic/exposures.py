"""Exposure log of nights: one Parquet file per experiment and hour, with each key once per arm.

A summary file has the counts, and the names of the merged parts: a part counts once, however often this runs. Only one
process may run it at a time: `retire` of the service's own namespace, or the command.
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
from cache.store.erasures import all_erasures
from cache.traffic.experiments import EXPERIMENT_NAME_PATTERN, EXPOSURES_FOLDER
from cache.usage.hot_keys import HOUR_S
from precompute.config.settings import NightConfig
from precompute.releases.release_log import Releases

LATE_PARTS_S = 900.0
"""Seconds after an hour's end in which its parts may still arrive; later parts are added to the file."""

EXPOSURE_SCHEMA = pa.schema([("key", pa.string()), ("arm", pa.string()), ("at", pa.timestamp("ms", tz="UTC"))])
_PARTS_FOLDER = f"{EXPOSURES_FOLDER}/parts"
# Other files in the folder are ignored.
_PART_NAME = re.compile(r"([0-9]{1,12})\..*\.json")


@dataclass(slots=True)
class ArmTotals:
    """Totals of one arm: requests, exposed keys summed over hours, events by name."""

    request_count: int = 0
    exposed_key_count: int = 0
    count_by_feedback_event: Counter[str] = field(default_factory=Counter)

    def add(self, summary_counts: Mapping[str, Any]) -> None:
        """Add the counts of a part or a summary; raise KeyError, TypeError or ValueError if they are malformed."""
        self.request_count += int(summary_counts["requests"])
        self.count_by_feedback_event.update(
            {str(event): int(count) for event, count in summary_counts["feedback"].items()}
        )

    def to_json(self) -> dict[str, Any]:
        """Return the totals as JSON."""
        return {
            "requests": self.request_count,
            "exposures": self.exposed_key_count,
            "feedback": dict(sorted(self.count_by_feedback_event.items())),
        }


def gather_exposures(
    store: ArtefactStore, *, gathered_at: float, erased_keys: Collection[bytes] = (), late_s: float = LATE_PARTS_S
) -> dict[str, int]:
    """Merge the parts of all hours that ended `late_s` ago into files; return the numbers of hours, files and parts.

    Merged parts are removed, and keys in `erased_keys` are left out. Safe to repeat after a crash at any point.
    """
    file_count = part_count = 0
    part_names_by_hour = {
        hour: part_names
        for hour, part_names in _part_names_by_hour(store).items()
        if (hour + 1) * HOUR_S + late_s <= gathered_at
    }
    for hour, part_names in part_names_by_hour.items():
        hour_parts = _read_parts(store, part_names)
        for experiment in sorted({arm_line["experiment"] for _, arm_lines in hour_parts for arm_line in arm_lines}):
            _merge_parts(store, experiment, hour, hour_parts, erased_keys)
            file_count += 1
        for part_name, _ in hour_parts:
            store.delete(f"{_PARTS_FOLDER}/{part_name}")
        part_count += len(hour_parts)
    return {"hours": len(part_names_by_hour), "files": file_count, "parts": part_count}


def gather_in_night(config: NightConfig, releases: Releases, _needed_generations: Collection[str]) -> dict[str, int]:
    """Merge the parts of the hours that ended; return `exposure_parts` for the step's report."""
    store = config.store()
    return {
        "exposure_parts": gather_exposures(store, gathered_at=releases.clock(), erased_keys=erased_users(store))[
            "parts"
        ]
    }


def erased_users(store: ArtefactStore) -> frozenset[bytes]:
    """Return the users that no file may name, whose erasures are in force."""
    erasures = all_erasures(store)
    return frozenset(erasure.raw_id for erasure in erasures if erasure.is_in_force and erasure.kind == "user")


def read_totals_by_arm(store: ArtefactStore, experiment_name: str) -> dict[str, ArmTotals]:
    """Return the totals by arm over all hours; in parts that are not merged yet, keys are counted per part."""
    totals_by_arm: dict[str, ArmTotals] = {}
    experiment_folder, merged_part_names = f"{EXPOSURES_FOLDER}/{experiment_name}", set[str]()
    summary_names = [summary_name for summary_name in store.names(experiment_folder) if summary_name.endswith(".json")]
    for summary_path, raw_summary in sorted(
        store.read_many([f"{experiment_folder}/{summary_name}" for summary_name in summary_names]).items()
    ):
        summary = _parse_document(summary_path, raw_summary)
        merged_part_names.update(summary["parts"])
        for arm, arm_counts in summary["arms"].items():
            arm_totals = totals_by_arm.setdefault(arm, ArmTotals())
            arm_totals.add(arm_counts)
            arm_totals.exposed_key_count += int(arm_counts["exposures"])
    waiting_part_names = [
        name
        for part_names in _part_names_by_hour(store).values()
        for name in part_names
        if name not in merged_part_names
    ]
    for _, arm_lines in _read_parts(store, waiting_part_names):
        for arm_line in arm_lines:
            if arm_line["experiment"] == experiment_name:
                arm_totals = totals_by_arm.setdefault(arm_line["arm"], ArmTotals())
                arm_totals.add(arm_line)
                arm_totals.exposed_key_count += len(arm_line["exposures"])
    return totals_by_arm


def forget_keys(store: ArtefactStore, keys: Collection[bytes]) -> int:
    """Remove keys from all files and parts; return the number of files and parts that had one."""
    if not keys:
        return 0
    forgotten_keys, changed_file_count = {key.decode() for key in keys}, 0
    for experiment in _exposed_experiments(store):
        for name in store.names(f"{EXPOSURES_FOLDER}/{experiment}"):
            path = f"{EXPOSURES_FOLDER}/{experiment}/{name}"
            if name.endswith(".parquet") and (raw_parquet := store.read(path)) is not None:
                changed_file_count += _remove_keys_from_file(store, path, raw_parquet, keys)
    for name, arm_lines in _read_parts(
        store, [name for names in _part_names_by_hour(store).values() for name in names]
    ):
        kept_arm_lines = [
            {
                **arm_line,
                "exposures": [exposure for exposure in arm_line["exposures"] if exposure[0] not in forgotten_keys],
            }
            for arm_line in arm_lines
        ]
        if kept_arm_lines != arm_lines:
            store.write(f"{_PARTS_FOLDER}/{name}", orjson.dumps({"arms": kept_arm_lines}))
            changed_file_count += 1
    return changed_file_count


def _remove_keys_from_file(
    store: ArtefactStore, parquet_path: str, raw_parquet: bytes, removed_keys: Collection[bytes]
) -> bool:
    rows = pq.read_table(io.BytesIO(raw_parquet))
    remaining_rows = _without_keys(rows, removed_keys)
    if len(remaining_rows) < len(rows):
        store.write(parquet_path, _parquet_bytes(remaining_rows))
    return len(remaining_rows) < len(rows)


def _merge_parts(
    store: ArtefactStore,
    experiment: str,
    hour: int,
    parts: Iterable[tuple[str, list[dict[str, Any]]]],
    erased_keys: Collection[bytes],
) -> None:
    """Merge parts into an experiment's file of an hour, then update its summary; a repeat changes nothing."""
    hour_path = f"{EXPOSURES_FOLDER}/{experiment}/{hour}"
    raw_summary = store.read(f"{hour_path}.json")
    summary = {"parts": [], "arms": {}} if raw_summary is None else _parse_document(f"{hour_path}.json", raw_summary)
    totals_by_arm: dict[str, ArmTotals] = {}
    for arm, summary_counts in summary["arms"].items():
        totals_by_arm.setdefault(arm, ArmTotals()).add(summary_counts)
    known_part_names, part_names, exposure_tables = set(summary["parts"]), [], []
    for part_name, arm_lines in parts:
        experiment_arm_lines = [arm_line for arm_line in arm_lines if arm_line["experiment"] == experiment]
        part_names += [part_name] if experiment_arm_lines else []
        for arm_line in experiment_arm_lines:
            exposure_tables.append(_exposure_table(arm_line["arm"], arm_line["exposures"]))
            if part_name not in known_part_names:
                totals_by_arm.setdefault(arm_line["arm"], ArmTotals()).add(arm_line)
    exposure_rows = _write_exposures(store, f"{hour_path}.parquet", exposure_tables, erased_keys)
    for value_count in pc.value_counts(exposure_rows["arm"]).to_pylist():
        totals_by_arm.setdefault(value_count["values"], ArmTotals()).exposed_key_count = value_count["counts"]
    new_summary = {
        "experiment": experiment,
        "hour": hour,
        "parts": sorted(known_part_names.union(part_names)),
        "arms": {arm: totals_by_arm[arm].to_json() for arm in sorted(totals_by_arm)},
    }
    store.write(f"{hour_path}.json", orjson.dumps(new_summary, option=orjson.OPT_APPEND_NEWLINE))


def _exposure_table(arm_name: str, exposed_keys_and_times: Iterable[tuple[str, float]]) -> pa.Table:
    exposure_pairs = list(exposed_keys_and_times)
    at_ms = pa.array([round(at * 1000) for _, at in exposure_pairs], pa.int64())
    columns = {
        "key": pa.array([key for key, _ in exposure_pairs], pa.string()),
        "arm": pa.array([arm_name] * len(exposure_pairs), pa.string()),
        "at": at_ms.cast(EXPOSURE_SCHEMA.field("at").type),
    }
    return pa.table(columns, schema=EXPOSURE_SCHEMA)


def _write_exposures(
    store: ArtefactStore, parquet_path: str, exposure_tables: list[pa.Table], erased_keys: Collection[bytes]
) -> pa.Table:
    """Add rows to an hour's file; return all its rows: each arm and key once, with its first time."""
    raw_parquet = store.read(parquet_path)
    existing_rows = (
        EXPOSURE_SCHEMA.empty_table()
        if raw_parquet is None
        else pq.read_table(io.BytesIO(raw_parquet), schema=EXPOSURE_SCHEMA)
    )
    grouped = pa.concat_tables([existing_rows, *exposure_tables]).group_by(["arm", "key"])
    rows = grouped.aggregate([("at", "min")]).rename_columns(["arm", "key", "at"])
    rows = _without_keys(rows.select(EXPOSURE_SCHEMA.names), erased_keys).sort_by(
        [("arm", "ascending"), ("key", "ascending")]
    )
    if len(rows) or raw_parquet is not None:
        store.write(parquet_path, _parquet_bytes(rows))
    return rows


def _without_keys(exposure_rows: pa.Table, removed_keys: Collection[bytes]) -> pa.Table:
    """Return the rows whose key is not removed."""
    removed_key_texts = pa.array(sorted(key.decode() for key in removed_keys), pa.string())
    return exposure_rows.filter(pc.invert(pc.is_in(exposure_rows["key"], value_set=removed_key_texts)))


def _parquet_bytes(exposure_table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(exposure_table, buffer)
    return buffer.getvalue()


def _exposed_experiments(store: ArtefactStore) -> list[str]:
    return [
        experiment
        for experiment in store.names(EXPOSURES_FOLDER)
        if experiment != "parts" and EXPERIMENT_NAME_PATTERN.fullmatch(experiment)
    ]


def _part_names_by_hour(store: ArtefactStore) -> dict[int, list[str]]:
    """Return the names of the parts by hour, in order."""
    part_names_by_hour: dict[int, list[str]] = {}
    for part_name in store.names(_PARTS_FOLDER):
        if name_match := _PART_NAME.fullmatch(part_name):
            part_names_by_hour.setdefault(int(name_match[1]), []).append(part_name)
    return dict(sorted(part_names_by_hour.items()))


def _read_parts(store: ArtefactStore, part_names: Iterable[str]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (name, arms' entries) of each part."""
    name_by_path = {f"{_PARTS_FOLDER}/{part_name}": part_name for part_name in part_names}
    raw_by_path = store.read_many(list(name_by_path))
    return [(name_by_path[path], _parse_document(path, raw)["arms"]) for path, raw in sorted(raw_by_path.items())]


def _parse_document(path: str, raw_document: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(raw_document)
        if not isinstance(document, dict) or "arms" not in document:
            raise TypeError("it has no arms")
    except (orjson.JSONDecodeError, TypeError) as error:
        raise CorruptArtefact(
            f"{path} is not a part of the exposure log ({error}): restore it from a backup of the store, or remove it",
            path=path,
        ) from error
    return document
