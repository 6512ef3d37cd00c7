"""Dashboards held against Grafana's own schema, by the types that Grafana Labs generates from it for Python.

A field that these types do not know is dropped as they read it, so what they write again is what they understood.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

INFRA = Path(__file__).parents[3] / "infra"
BOARDS = {file.stem: json.loads(file.read_text()) for file in sorted((INFRA / "grafana/dashboards").glob("*.json"))}
ELSEWHERE = {".annotations.list[0].titleFormat", ".templating.list[0].definition"}
"""Fields that Grafana's own pages write and read, and its schema leaves out."""


def misunderstood(board: dict[str, Any]) -> set[str]:
    """Paths of what Grafana's types drop or read as something else."""
    sdk = pytest.importorskip("grafana_foundation_sdk", reason="the extra `dev` has it")
    assert sdk
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return set(differing(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board)))))


def differing(original: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Paths at which the second lacks what the first has."""
    if isinstance(original, dict) and isinstance(theirs, dict):
        for key, value in original.items():
            yield from differing(value, theirs.get(key), f"{path}.{key}")
    elif isinstance(original, list) and isinstance(theirs, list) and len(original) == len(theirs):
        for number, (original_item, decoded_item) in enumerate(zip(original, theirs, strict=True)):
            yield from differing(original_item, decoded_item, f"{path}[{number}]")
    elif original != theirs:
        yield path


@pytest.mark.parametrize("name", BOARDS)
def test_grafanas_schema_knows_every_field_of_a_dashboard(name: str) -> None:
    assert misunderstood(BOARDS[name]) <= ELSEWHERE


@pytest.mark.parametrize(
    ("json_path", "key"),
    [
        ([], "timeZone"),
        (["panels", 0], "grid"),
        (["panels", 0, "options"], "reduce"),
        (["panels", 0, "fieldConfig", "defaults"], "units"),
        (["panels", 0, "targets", 0], "query"),
    ],
)
def test_a_field_that_is_none_is_noticed(json_path: list[Any], key: str) -> None:
    board = copy.deepcopy(BOARDS["serving"])
    node = board
    for step in json_path:
        node = node[step]
    node[key] = "planted"

    assert {path.rpartition(".")[2] for path in misunderstood(board) - ELSEWHERE} == {key}


def test_a_variable_asks_for_the_values_of_a_label_and_names_its_source() -> None:
    for board in BOARDS.values():
        for variable in board["templating"]["list"]:
            assert variable["type"] == "query" and variable["query"]["query"] == variable["definition"]
            assert variable["datasource"] == {"type": "prometheus", "uid": "larder-prometheus"}


def test_what_is_provisioned_has_the_fields_that_grafana_reads() -> None:
    folder = INFRA / "grafana/provisioning"
    boards = yaml.safe_load((folder / "dashboards/larder.yaml").read_text())
    sources = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())
    compose = yaml.safe_load((INFRA / "compose.yaml").read_text())["services"]["grafana"]

    assert boards["apiVersion"] == sources["apiVersion"] == 1
    (provider,) = boards["providers"]
    assert set(provider) <= {
        "name", "orgId", "folder", "folderUid", "type", "disableDeletion", "updateIntervalSeconds", "allowUiUpdates",
        "options",
    }  # fmt: skip
    assert provider["type"] == "file"
    # The container has the path that the provider reads.
    mounts = {volume.split(":")[1] for volume in compose["volumes"]}
    assert any(provider["options"]["path"] == mount for mount in mounts)
    for source in sources["datasources"]:
        assert {"name", "type", "access", "url", "uid"} <= set(source)
        assert set(source) <= {
            "name", "uid", "type", "access", "url", "isDefault", "jsonData", "secureJsonData", "editable", "orgId",
            "version", "basicAuth", "basicAuthUser", "user", "database", "withCredentials",
        }  # fmt: skip
