"""Room on readers' hosts is judged by what live replicas report, never by the host on which `verify` happens to run."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache.config.night import GateThresholds
from cache.control.control_keys import Replica
from precompute.bulk.headroom import ArmRoom
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.rules.headroom import disk_headroom, memory_headroom, redis_room

MAPPED = 1_000
ROOMY = 10**9


def candidate(*replicas: Replica, keep: int = 1, arms: tuple[ArmRoom, ...] = ()) -> Candidate:
    """A generation that maps `MAPPED` bytes, and who would read it."""
    return cast(
        Candidate,
        SimpleNamespace(
            manifest=SimpleNamespace(served_artefacts=lambda: [SimpleNamespace(size_bytes=MAPPED)]),
            control=SimpleNamespace(replicas=lambda: list(replicas)),
            thresholds=GateThresholds(),
            superseded_count=keep,
            arm_rooms=arms,
        ),
    )


def replica(name: str, **headroom: Any) -> Replica:
    return Replica(name, 0.0, None, (), **headroom)


@pytest.mark.parametrize(
    ("gate", "headroom_field", "needed"),
    [(disk_headroom, "disk_free_bytes", MAPPED), (memory_headroom, "memory_available_bytes", 4 * MAPPED)],
)  # fmt: skip
def test_the_replica_with_the_least_room_decides(gate: Any, headroom_field: str, needed: int) -> None:
    other_replicas = replica("roomy", **{headroom_field: ROOMY}), replica("of an earlier version")

    assert gate(candidate(*other_replicas, replica("tight", **{headroom_field: needed}))).passed
    measurement = gate(candidate(*other_replicas, replica("tight", **{headroom_field: needed - 1})))

    assert not measurement.passed and measurement.note.endswith("on tight")


def test_every_superseded_generation_that_is_kept_takes_memory() -> None:
    tight = replica("tight", memory_available_bytes=4 * MAPPED)

    assert memory_headroom(candidate(tight, keep=1)).passed
    assert not memory_headroom(candidate(tight, keep=2)).passed


def test_arms_of_experiments_take_memory_of_the_same_hosts() -> None:
    arm = ArmRoom("second", ("e=b",), 2, 10, 2_000, 1_000, MAPPED)

    tight, enough = (replica("r", memory_available_bytes=mapped_multiple * MAPPED) for mapped_multiple in (7, 8))

    assert memory_headroom(candidate(enough, arms=(arm,))).passed
    measurement = memory_headroom(candidate(tight, arms=(arm,)))
    assert not measurement.passed and "arms of experiments 4,000" in measurement.note


@pytest.mark.parametrize("gate", [disk_headroom, memory_headroom])
def test_without_a_replica_that_says_what_it_has_nothing_is_refused(gate: Any) -> None:
    for measurement in (gate(candidate()), gate(candidate(replica("of an earlier version")))):
        assert measurement.passed and measurement.measured_value is None and "no live replica" in measurement.note


@pytest.mark.parametrize(
    ("used_bytes", "passed", "used_share"), [(800, True, 0.8), (801, False, 0.801), (0, True, 0.0)]
)
def test_redis_may_be_filled_up_to_the_threshold(used_bytes: int, passed: bool, used_share: float) -> None:
    room = redis_room("primary", used_bytes, 1_000, "maxmemory", 0.8)

    assert (room.passed, room.measured_value, room.threshold) == (passed, used_share, 0.8)
    assert room.note == f"{used_bytes} bytes of 1,000, maxmemory"


def test_a_server_of_several_is_named() -> None:
    room = redis_room("10.0.0.7:6379", 5, 10, "maxmemory", 0.8)

    assert room.passed and room.note == "5 bytes of 10, maxmemory of 10.0.0.7:6379"


def test_a_server_that_does_not_say_its_limit_is_refused() -> None:
    room = redis_room("primary", 0, 0, "its host's memory", 0.8)

    assert not room.passed and room.measured_value is None and room.threshold == 0.8
    assert "neither maxmemory nor its host's memory" in room.note
