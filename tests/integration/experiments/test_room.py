"""Room of arms: what plan and gates say of it is what lies in Redis, and what is over is not counted any more."""

import argparse
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.markup import render

from cache.errors import Conflict
from cache.store.artefacts import read_manifest
from precompute.bulk.governor import Governor
from precompute.cli.parser import build_command_parser
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig, peak_generation_count
from precompute.planning.capacity import find_limits
from precompute.releases.recovery import restore
from precompute.traffic import experiments
from precompute.traffic.experiment_command import free_namespaces
from precompute.traffic.experiments import ArmOption, ExperimentOption, compute_arm_rooms
from tests.integration.experiments.arms import arms, live_of
from tests.integration.fleet import control_of
from tests.integration.nights import publish_night


def pages_of(config: NightConfig) -> tuple[int, int]:
    """Number of page keys in Redis, and their bytes."""
    with control_of(config) as control:
        pattern = f"larder:1:{config.namespace}:g:*"
        names = [key for key in control.client.scan_iter(pattern) if not key.endswith(b"loaded")]
        return len(names), sum(int(control.client.strlen(key)) for key in names)


def plan(config: NightConfig) -> dict[str, Any]:
    argv = ["plan", "--json", "--sample", "1", "--seconds", "0.2"]
    arguments: argparse.Namespace = build_command_parser().parse_args(argv)
    (text,) = arguments.run.import_command()(config, arguments, quiet)
    plan_report: dict[str, Any] = orjson.loads(render(text).plain)
    return plan_report


def test_what_arms_take_is_said_by_plan_and_gates_until_it_is_freed(tmp_path: Path, redis_url: str) -> None:
    own_config, first_arm_config, two = arms(tmp_path, redis_url, 2)

    def start(name: str, arm_config: NightConfig) -> None:
        named = (ArmOption("control", own_config.namespace, 0.5), ArmOption("b", arm_config.namespace, 0.5))
        experiments.start(own_config, ExperimentOption(own_config.namespace, name, named, 0.3))

    start("ranker", first_arm_config)
    start("cold", two)
    limits_before = find_limits(own_config, record_bytes=100)

    with control_of(own_config) as control:
        arm_rooms = compute_arm_rooms(own_config, control.client)

    assert [(arm_room.namespace, arm_room.arms) for arm_room in arm_rooms] == [
        (first_arm_config.namespace, ("ranker=b",)),
        (two.namespace, ("cold=b",)),
    ]
    for arm_room, config in zip(arm_rooms, (first_arm_config, two), strict=True):
        assert (arm_room.pages, arm_room.size_bytes) == pages_of(config)
        assert arm_room.generations == 1 and arm_room.largest_bytes == arm_room.size_bytes
    generations = peak_generation_count(own_config.keep)
    plan_report = plan(own_config)
    assert [arm_row["namespace"] for arm_row in plan_report["arms"]] == [first_arm_config.namespace, two.namespace]
    growth = (generations - 1) * sum(arm_room.size_bytes for arm_room in arm_rooms)
    assert limits_before.arms == arm_rooms and limits_before.nodes[0].other_bytes > growth
    # The gates of a control's night report it; those of an arm's night look only at the arm's own memory.
    publish_night(own_config, "2026-01-30T00:00:00Z")
    gates = {verdict["rule"]: verdict for verdict in read_manifest(own_config.store(), live_of(own_config)).gates}
    assert f"ranker=b ({first_arm_config.namespace}): {arm_rooms[0].pages:,} pages" in gates["redis_headroom"]["note"]

    with pytest.raises(Conflict, match="not over"):
        free_namespaces(own_config, "ranker")
    start("also", first_arm_config)
    experiments.stop(own_config, "ranker")
    assert free_namespaces(own_config, "ranker")["freed"] == [] and pages_of(first_arm_config)[0] > 0
    experiments.stop(own_config, "also")
    with control_of(own_config) as control:
        assert [arm_room.namespace for arm_room in compute_arm_rooms(own_config, control.client)] == [two.namespace]
    live = live_of(first_arm_config)
    freed = free_namespaces(own_config, "ranker")
    assert freed == {"experiment": "ranker", "freed": [first_arm_config.namespace], "kept": [], "keys": freed["keys"]}
    assert pages_of(first_arm_config) == (0, 0) and pages_of(two)[0] > 0 and pages_of(own_config)[0] > 0
    with control_of(first_arm_config) as control:
        assert control.read_pointer() is None and control.rows() == {}
    # The store has lost nothing.
    restore(first_arm_config, attempt="again")
    assert live_of(first_arm_config) == live and pages_of(first_arm_config) == (
        arm_rooms[0].pages,
        arm_rooms[0].size_bytes,
    )


def test_pages_are_freed_at_the_pace_of_the_governor(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_config, arm_config = arms(tmp_path, redis_url)
    named = (ArmOption("control", own_config.namespace, 0.5), ArmOption("b", arm_config.namespace, 0.5))
    experiments.start(own_config, ExperimentOption(own_config.namespace, "ranker", named, 0.3))
    experiments.stop(own_config, "ranker")
    _, size_bytes = pages_of(arm_config)
    paced: list[int] = []
    monkeypatch.setattr(Governor, "pace", lambda _governor, size: paced.append(size))

    free_namespaces(own_config, "ranker")

    assert sum(paced) == size_bytes > 0
