"""The exposure log as nights make it: one Parquet file for an experiment and hour, each key once for an arm.

A summary beside it has what was counted, and which parts it is made of: a part counts once, however often this runs.
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

from cache.control.hot_keys import HOUR_S
from cache.errors import CorruptArtefact
from cache.store.artefacts import ArtefactStore
from cache.store.experiments import EXPOSURES, NAME
from precompute.erasures.erasure import all_erasures

LATE_S = 900.0
"""Seconds after an hour's end in which parts of it may still come; later ones are added to what is there."""

SCHEMA = pa.schema([("key", pa.string()), ("arm", pa.string()), ("at", pa.timestamp("ms", tz="UTC"))])  # fmt: skip
_PARTS = f"{EXPOSURES}/parts"
# Whatever else somebody leaves in the folder is no part.
_PART = re.compile(r"([0-9]{1,12})\..*\.json")


@dataclass(slots=True)
class ArmTotals:
    """Totals of one arm: requests, keys written down in each hour, events by name."""

    requests: int = 0
    exposures: int = 0
    feedback: Counter[str] = field(default_factory=Counter)

    def add(self, counted: Mapping[str, Any]) -> None:
        """Adds the counts of a part or a summary; raises KeyError, TypeError or ValueError for what is neither."""
        self.requests += int(counted["requests"])
        self.feedback.update({str(each): int(count) for each, count in counted["feedback"].items()})

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
    ended = {
        hour: names for hour, names in _listed(store).items() if (hour + 1) * HOUR_S + late_s <= at
    }
    for hour, names in ended.items():
        found = _read(store, names)
        for experiment in sorted({each["experiment"] for _, lines in found for each in lines}):
            _merge(store, experiment, hour, found, erased)
            files += 1
        for name, _ in found:
            store.delete(f"{_PARTS}/{name}")
        parts += len(found)
    return {"hours": len(ended), "files": files, "parts": parts}


def erased_users(store: ArtefactStore) -> frozenset[bytes]:
    """Users that no file may name: those whose erasures are in force."""
    erasures = all_erasures(store)
    return frozenset(each.raw for each in erasures if each.is_in_force and each.kind == "user")


def totals(store: ArtefactStore, experiment: str) -> dict[str, ArmTotals]:
    """Totals by arm over all hours, those included of which there are parts only; keys of those are counted by part."""
    found: dict[str, ArmTotals] = {}
    folder, merged = f"{EXPOSURES}/{experiment}", set[str]()
    names = [each for each in store.names(folder) if each.endswith(".json")]
    for path, raw in sorted(store.read_many([f"{folder}/{each}" for each in names]).items()):
        summary = _document(path, raw)
        merged.update(summary["parts"])
        for arm, counted in summary["arms"].items():
            total = found.setdefault(arm, ArmTotals())
            total.add(counted)
            total.exposures += int(counted["exposures"])
    waiting = [name for names in _listed(store).values() for name in names if name not in merged]
    for _, lines in _read(store, waiting):
        for each in lines:
            if each["experiment"] == experiment:
                total = found.setdefault(each["arm"], ArmTotals())
                total.add(each)
                total.exposures += len(each["exposures"])
    return found


def forget_keys(store: ArtefactStore, keys: Collection[bytes]) -> int:
    """Remove keys from all files and parts; how many of these held one of them."""
    if not keys:
        return 0
    texts, changed = {each.decode() for each in keys}, 0
    for experiment in _experiments(store):
        for name in store.names(f"{EXPOSURES}/{experiment}"):
            path = f"{EXPOSURES}/{experiment}/{name}"
            if name.endswith(".parquet") and (raw := store.read(path)) is not None:
                changed += _without(store, path, raw, keys)
    for name, lines in _read(store, [name for names in _listed(store).values() for name in names]):
        kept = [
            {**each, "exposures": [pair for pair in each["exposures"] if pair[0] not in texts]}
            for each in lines
        ]
        if kept != lines:
            store.write(f"{_PARTS}/{name}", orjson.dumps({"arms": kept}))
            changed += 1
    return changed


def _without(store: ArtefactStore, path: str, raw: bytes, keys: Collection[bytes]) -> bool:
    rows = pq.read_table(io.BytesIO(raw))
    left = _left(rows, keys)
    if len(left) < len(rows):
        store.write(path, _parquet(left))
    return len(left) < len(rows)


def _merge(
    store: ArtefactStore,
    experiment: str,
    hour: int,
    found: Iterable[tuple[str, list[dict[str, Any]]]],
    erased: Collection[bytes],
) -> None:
    """Add parts to an experiment's file of an hour, then to its summary: adding to the file twice adds nothing."""
    path = f"{EXPOSURES}/{experiment}/{hour}"
    raw = store.read(f"{path}.json")
    summary = {"parts": [], "arms": {}} if raw is None else _document(f"{path}.json", raw)
    arms: dict[str, ArmTotals] = {}
    for arm, counted in summary["arms"].items():
        arms.setdefault(arm, ArmTotals()).add(counted)
    known, names, tables = set(summary["parts"]), [], []
    for name, lines in found:
        ours = [each for each in lines if each["experiment"] == experiment]
        names += [name] if ours else []
        for each in ours:
            tables.append(_rows(each["arm"], each["exposures"]))
            if name not in known:
                arms.setdefault(each["arm"], ArmTotals()).add(each)
    rows = _written(store, f"{path}.parquet", tables, erased)
    for counted in pc.value_counts(rows["arm"]).to_pylist():
        arms.setdefault(counted["values"], ArmTotals()).exposures = counted["counts"]
    told = {
        "experiment": experiment,
        "hour": hour,
        "parts": sorted(known.union(names)),
        "arms": {arm: arms[arm].to_json() for arm in sorted(arms)},
    }
    store.write(f"{path}.json", orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))


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
    before = SCHEMA.empty_table() if raw is None else pq.read_table(io.BytesIO(raw), schema=SCHEMA)
    grouped = pa.concat_tables([before, *tables]).group_by(["arm", "key"])
    rows = grouped.aggregate([("at", "min")]).rename_columns(["arm", "key", "at"])
    rows = _left(rows.select(SCHEMA.names), erased).sort_by(
        [("arm", "ascending"), ("key", "ascending")]
    )
    if len(rows) or raw is not None:
        store.write(path, _parquet(rows))
    return rows


def _left(rows: pa.Table, without: Collection[bytes]) -> pa.Table:
    """The rows without those of these keys."""
    texts = pa.array(sorted(each.decode() for each in without), pa.string())
    return rows.filter(pc.invert(pc.is_in(rows["key"], value_set=texts)))


def _parquet(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def _experiments(store: ArtefactStore) -> list[str]:
    return [each for each in store.names(EXPOSURES) if each != "parts" and NAME.fullmatch(each)]


def _listed(store: ArtefactStore) -> dict[int, list[str]]:
    """Names of the parts of each hour, in order."""
    hours: dict[int, list[str]] = {}
    for name in store.names(_PARTS):
        if found := _PART.fullmatch(name):
            hours.setdefault(int(found[1]), []).append(name)
    return dict(sorted(hours.items()))


def _read(store: ArtefactStore, names: Iterable[str]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Parts by name, each with the lines of its arms."""
    paths = {f"{_PARTS}/{each}": each for each in names}
    found = store.read_many(list(paths))
    return [(paths[path], _document(path, raw)["arms"]) for path, raw in sorted(found.items())]


def _document(path: str, raw: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(raw)
        if not isinstance(found, dict) or "arms" not in found:
            raise TypeError("it has no arms")
    except (orjson.JSONDecodeError, TypeError) as error:
        raise CorruptArtefact(
            f"{path} is no part of the exposure log ({error}): put it back from a copy of the store, or remove it",
            path=path,
        ) from error
    return found
