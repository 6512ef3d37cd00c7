"""What the page is tested with is what the service may tell; and what it may not is noticed."""

import json
from typing import Any

import pytest

from tests.dashboard.cases import CASES
from tests.dashboard.faults import faults
from tests.dashboard.healthy import well


@pytest.mark.parametrize("name", CASES)
def test_what_the_page_is_tested_with_keeps_to_the_contract(name: str) -> None:
    assert faults(json.loads(json.dumps(CASES[name]()))) == []


@pytest.mark.parametrize(
    ("key_path", "value", "fault"),
    [
        (("now",), "noon", ".now"),
        (("verdict", "level"), "fine", ".verdict.level"),
        (("redis", "used_bytes"), True, ".redis.used_bytes"),
        (("series", "stages", "parse"), [1.0], ".series.stages.parse"),
        (("generations", 0, "gates", 1, "value"), [], ".generations[0].gates[1].value"),
        (("quality", "by", 0, "exact", "rate"), float("nan"), ".quality.by[0].exact.rate"),
    ],
)
def test_a_fault_is_reported_with_its_key_path(key_path: tuple[Any, ...], value: object, fault: str) -> None:
    data: Any = well()
    part = data
    for step in key_path[:-1]:
        part = part[step]
    part[key_path[-1]] = value

    assert [fault_text.partition(":")[0] for fault_text in faults(data)] == [fault]
    del part[key_path[-1]]
    assert key_path[-1] == 0 or faults(data) or fault.startswith(".series")
