"""The walk of a lookup through the code, traced: how far it is, that nothing is done twice, that the docs tell it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from precompute.config.settings import NightConfig
from tests.bench.tools.walk import walks
from tests.call_walk import Call, calls_of, hops, modules, table
from tests.integration.nights import build_night, histories
from tests.integration.program import ROOT

PLAIN_ALONE = """
import sys
from serving.app import create_app, make_server
from serving.config.settings import ServingConfig

config = ServingConfig(artifacts=sys.argv[1], fast_http=sys.argv[2] == "on")
make_server(create_app(config), config, "warning", lambda: None)
print(any(name in ("serving.engine.hot_route", "serving.http.lookup_connection") for name in sys.modules))
"""


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url)


@pytest.fixture(scope="module")
def plain_walks(night: NightConfig) -> dict[str, list[Call]]:
    return asyncio.run(walks(night, sorted(histories(night)), fast_http=False))


@pytest.fixture(scope="module")
def fast(night: NightConfig) -> dict[str, list[Call]]:
    return asyncio.run(walks(night, sorted(histories(night)), fast_http=True))


def test_the_complete_way_of_a_get_is_short(plain_walks: dict[str, list[Call]]) -> None:
    walk = hops(plain_walks["get"])

    assert len(walk) <= 20 and len(modules(walk)) <= 12
    assert len(hops(plain_walks["unknown"])) <= 20


def test_the_complete_way_of_a_batch_is_short(plain_walks: dict[str, list[Call]]) -> None:
    assert len(hops(plain_walks["post"])) <= 25


@pytest.mark.parametrize("kind", ["get", "unknown"])
@pytest.mark.parametrize("walk_fixture", ["plain_walks", "fast"])
def test_an_id_is_hashed_and_looked_up_once(walk_fixture: str, kind: str, request: pytest.FixtureRequest) -> None:
    walk: list[Call] = request.getfixturevalue(walk_fixture)[kind]

    for function in ("hash_id", "fingerprint", "Directory.find_position"):
        assert calls_of(walk, lambda call, name=function: call.function == name) == 1, function  # type: ignore[misc]


@pytest.mark.parametrize("walk_fixture", ["plain_walks", "fast"])
def test_a_body_is_parsed_once(walk_fixture: str, request: pytest.FixtureRequest) -> None:
    walk: list[Call] = request.getfixturevalue(walk_fixture)["post"]

    assert calls_of(walk, lambda call: call.function == "read_json") == 1


@pytest.mark.parametrize("kind", ["get", "post"])
def test_the_documents_tell_the_walk(plain_walks: dict[str, list[Call]], kind: str) -> None:
    page = ROOT / "docs/explanation/life-of-a-lookup.md"

    assert table(hops(plain_walks[kind])) in page.read_text()


@pytest.mark.parametrize("fast_http", ["on", "off"])
def test_without_the_fast_way_its_rooms_are_not_imported(fast_http: str, tmp_path: Path) -> None:
    completed_process = subprocess.run(
        [sys.executable, "-c", PLAIN_ALONE, tmp_path, fast_http],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert completed_process.stdout.strip() == str(fast_http == "on")
