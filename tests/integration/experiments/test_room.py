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
from precompute.cli.parser import parser_of_commands
from precompute.config.generations_at_peak import generations_at_peak
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig
from precompute.experiments import changes
from precompute.experiments.edits import ArmOption, ExperimentOption
from precompute.experiments.freeing import free
from precompute.experiments.room import arms_room
from precompute.operations.restore import restore
from precompute.planning.capacity import limits_of
from tests.integration.experiments.arms import arms, live_of
from tests.integration.fleet import control_of
from tests.integration.nights import publish_night


def pages_of(config: NightConfig) -> tuple[int, int]:
    """Number of page keys in Redis, and their bytes."""
    with control_of(config) as control:
        pattern = f"larder:1:{config.namespace}:g:*"
        names = [each for each in control.client.scan_iter(pattern) if not each.endswith(b"loaded")]
        return len(names), sum(int(control.client.strlen(each)) for each in names)


def plan(config: NightConfig) -> dict[str, Any]:
    words = ["plan", "--json", "--sample", "1", "--seconds", "0.2"]
    arguments: argparse.Namespace = parser_of_commands().parse_args(words)
    (text,) = arguments.run.load()(config, arguments, quiet)
    found: dict[str, Any] = orjson.loads(render(text).plain)
    return found


def test_what_arms_take_is_said_by_plan_and_gates_until_it_is_freed(
    tmp_path: Path, redis_url: str
) -> None:
    own, one, two = arms(tmp_path, redis_url, 2)

    def start(name: str, other: NightConfig) -> None:
        named = (ArmOption("control", own.namespace, 0.5), ArmOption("b", other.namespace, 0.5))
        changes.start(own, ExperimentOption(own.namespace, name, named, 0.3))

    start("ranker", one)
    start("cold", two)
    before = limits_of(own, record_bytes=100)

    with control_of(own) as control:
        found = arms_room(own, control.client)

    assert [(each.namespace, each.arms) for each in found] == [
        (one.namespace, ("ranker=b",)),
        (two.namespace, ("cold=b",)),
    ]
    for each, config in zip(found, (one, two), strict=True):
        assert (each.pages, each.size_bytes) == pages_of(config)
        assert each.generations == 1 and each.largest_bytes == each.size_bytes
    generations = generations_at_peak(own.keep)
    told = plan(own)
    assert [each["namespace"] for each in told["arms"]] == [one.namespace, two.namespace]
    growth = (generations - 1) * sum(each.size_bytes for each in found)
    assert before.arms == found and before.nodes[0].other_bytes > growth
    # A night of the control says so in its gates; one of an arm looks at what it has itself.
    publish_night(own, "2026-01-30T00:00:00Z")
    gates = {each["rule"]: each for each in read_manifest(own.store(), live_of(own)).gates}
    assert (
        f"ranker=b ({one.namespace}): {found[0].pages:,} pages" in gates["redis_headroom"]["note"]
    )

    with pytest.raises(Conflict, match="not over"):
        free(own, "ranker")
    start("also", one)
    changes.stop(own, "ranker")
    assert free(own, "ranker")["freed"] == [] and pages_of(one)[0] > 0
    changes.stop(own, "also")
    with control_of(own) as control:
        assert [each.namespace for each in arms_room(own, control.client)] == [two.namespace]
    live = live_of(one)
    freed = free(own, "ranker")
    assert freed == {"experiment": "ranker", "freed": [one.namespace], "kept": [], "keys": freed["keys"]}  # fmt: skip
    assert pages_of(one) == (0, 0) and pages_of(two)[0] > 0 and pages_of(own)[0] > 0
    with control_of(one) as control:
        assert control.pointer() is None and control.rows() == {}
    # Nothing of the truth is gone.
    restore(one, attempt="again")
    assert live_of(one) == live and pages_of(one) == (found[0].pages, found[0].size_bytes)


def test_pages_are_freed_at_the_pace_of_the_governor(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = arms(tmp_path, redis_url)
    named = (ArmOption("control", own.namespace, 0.5), ArmOption("b", other.namespace, 0.5))
    changes.start(own, ExperimentOption(own.namespace, "ranker", named, 0.3))
    changes.stop(own, "ranker")
    _, size_bytes = pages_of(other)
    paced: list[int] = []
    monkeypatch.setattr(Governor, "pace", lambda _governor, size: paced.append(size))

    free(own, "ranker")

    assert sum(paced) == size_bytes > 0
