"""Files of the exposure log: exact whatever came when, twice or in between; and without those who were erased."""

import io
import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.errors import CorruptArtefact
from cache.store.artefacts import ArtefactStore
from cache.traffic.experiments import exposure_part_path
from precompute.traffic import exposures
from precompute.traffic.exposures import ArmTotals, forget_keys, gather_exposures, read_totals_by_arm

HOUR = 500_000
LATER = (HOUR + 10) * 3_600.0


def part(store: ArtefactStore, hour: int, replica: str, number: int, *arms: dict[str, Any]) -> None:
    assert store.write_once(exposure_part_path(hour, replica, number), orjson.dumps({"arms": arms}))


def line(arm: str, keys: dict[str, float], requests: int = 1, experiment: str = "e", **feedback: int) -> dict[str, Any]:
    return {
        "experiment": experiment, "arm": arm, "requests": requests, "feedback": feedback,
        "exposures": [[key, at] for key, at in keys.items()],
    }  # fmt: skip


def rows(store: ArtefactStore, hour: int = HOUR, experiment: str = "e") -> dict[tuple[str, str], float]:
    raw = store.read(f"exposures/{experiment}/{hour}.parquet")
    if raw is None:  # of no key there is no file
        return {}
    table = pq.read_table(io.BytesIO(raw))
    exposure_times = {(row["arm"], row["key"]): row["at"].timestamp() for row in table.to_pylist()}
    assert len(exposure_times) == len(table)
    return exposure_times


def test_parts_of_all_replicas_become_one_file_without_repeated_keys(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    part(store, HOUR, "r1", 1, line("x", {"a": 5.5, "b": 6.0}, 4, click=1), line("y", {"c": 1.0}))
    part(store, HOUR, "r2", 1, line("x", {"a": 4.25}, 2, click=2, buy=1))
    part(store, HOUR, "r2", 2, line("x", {"z": 1.0}, experiment="other"))
    part(store, HOUR + 20, "r2", 3, line("x", {"a": 1.0}, 7))

    ungathered_totals = {name: arm_totals.to_json() for name, arm_totals in read_totals_by_arm(store, "e").items()}
    assert gather_exposures(store, gathered_at=LATER) == {"hours": 1, "files": 2, "parts": 3}

    assert rows(store) == {("x", "a"): 4.25, ("x", "b"): 6.0, ("y", "c"): 1.0}
    assert rows(store, experiment="other") == {("x", "z"): 1.0}
    after = {name: arm_totals.to_json() for name, arm_totals in read_totals_by_arm(store, "e").items()}
    assert after["x"] == {"requests": 13, "exposures": 3, "feedback": {"buy": 1, "click": 3}}
    # Before the parts were gathered, each counted for itself.
    assert ungathered_totals == {"x": {**after["x"], "exposures": 4}, "y": after["y"]}
    assert store.names("exposures/parts") == [f"{HOUR + 20}.r2-3.json"]
    assert gather_exposures(store, gathered_at=LATER) == {"hours": 0, "files": 0, "parts": 0}


def test_a_part_that_comes_late_is_added(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    part(store, HOUR, "r1", 1, line("x", {"a": 5.0}, 2, click=1))
    gather_exposures(store, gathered_at=LATER)

    part(store, HOUR, "r2", 1, line("x", {"a": 4.0, "b": 9.0}, 3, click=1))
    gather_exposures(store, gathered_at=LATER)

    assert rows(store) == {("x", "a"): 4.0, ("x", "b"): 9.0}
    assert read_totals_by_arm(store, "e")["x"].to_json() == {
        "requests": 5, "exposures": 2, "feedback": {"click": 2}
    }  # fmt: skip


class Dies(ArtefactStore):
    """A store whose program is killed before its `left`th change."""

    changes_left = 0

    def _step(self) -> None:
        self.changes_left -= 1
        if self.changes_left < 0:
            raise KeyboardInterrupt

    def write(self, path: str, data: bytes) -> None:
        self._step()
        super().write(path, data)

    def delete(self, path: str) -> None:
        self._step()
        super().delete(path)


@pytest.mark.parametrize("changes_left", range(7))
def test_killed_at_any_place_and_run_again_it_is_as_if_it_had_run_once(tmp_path: Path, changes_left: int) -> None:
    store = Dies(str(tmp_path))
    part(store, HOUR, "r1", 1, line("x", {"a": 5.0}, 2, click=1), line("x", {"q": 1.0}, 1, "other"))
    part(store, HOUR, "r2", 1, line("y", {"a": 4.0}, 3))

    store.changes_left = changes_left
    with pytest.raises(KeyboardInterrupt) if changes_left < 6 else nullcontext():
        gather_exposures(store, gathered_at=LATER)
    store.changes_left = 99
    gather_exposures(store, gathered_at=LATER)

    assert rows(store) == {("x", "a"): 5.0, ("y", "a"): 4.0}
    assert rows(store, experiment="other") == {("x", "q"): 1.0}
    assert read_totals_by_arm(store, "e") == {"x": ArmTotals(2, 1, Counter(click=1)), "y": ArmTotals(3, 1, Counter())}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_whatever_comes_in_whatever_order_the_log_is_exact(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = ArtefactStore(str(tmp_path / str(seed)))
    expected: dict[tuple[str, str], float] = {}
    requests = 0
    for number in range(rng.randrange(1, 12)):
        arms = []
        for arm in "xy":
            named = [f"k{rng.randrange(6)}" for _ in range(rng.randrange(4))]
            keys = {key: round(rng.random() * 3_600, 3) for key in named}
            arms.append(line(arm, keys, 2))
            requests += 2
            for key, at in keys.items():
                expected[arm, key] = min(at, expected.get((arm, key), at))
        part(store, HOUR, f"r{rng.randrange(3)}", number, *arms)
        if rng.random() < 0.3:
            gather_exposures(store, gathered_at=LATER)
    gather_exposures(store, gathered_at=LATER)

    assert rows(store) == expected
    assert sum(arm_totals.request_count for arm_totals in read_totals_by_arm(store, "e").values()) == requests


def test_who_was_erased_is_in_no_file_and_no_part(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    part(store, HOUR, "r1", 1, line("x", {"gone": 5.0, "b": 6.0}, 4))
    gather_exposures(store, gathered_at=LATER)
    part(store, HOUR + 1, "r1", 2, line("x", {"gone": 5.0, "c": 6.0}, 4))

    assert forget_keys(store, [b"gone"]) == 2
    assert forget_keys(store, [b"gone"]) == 0
    part(store, HOUR, "r2", 3, line("x", {"gone": 5.0, "d": 7.0}, 4))
    gather_exposures(store, gathered_at=LATER, erased_keys=[b"gone"])

    assert rows(store) == {("x", "b"): 6.0, ("x", "d"): 7.0}
    assert rows(store, HOUR + 1) == {("x", "c"): 6.0}
    assert read_totals_by_arm(store, "e")["x"].request_count == 12
    assert not any(b"gone" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_part_that_is_none_is_named(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    store.write(exposure_part_path(HOUR, "r1", 1), b"{")

    with pytest.raises(CorruptArtefact, match=r"exposures/parts/500000.r1-1.json is not a part"):
        gather_exposures(store, gathered_at=LATER)


def test_an_hour_waits_for_what_is_late(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    part(store, HOUR, "r1", 1, line("x", {"a": 5.0}))

    ends = (HOUR + 1) * 3_600.0
    assert gather_exposures(store, gathered_at=ends + exposures.LATE_PARTS_S - 1)["parts"] == 0
    assert gather_exposures(store, gathered_at=ends + exposures.LATE_PARTS_S)["parts"] == 1
