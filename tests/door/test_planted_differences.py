"""Plants wrong framing into a copy of the product: the corpus, and the caller behind nginx, notice it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.blackbox import Shop, open_shop, started
from tests.door.corpus import Case
from tests.door.judges import NODE, Judge
from tests.door.test_door import CASES, Door, behind_nginx, broken, hold_behind_nginx
from tests.planted_answers.plants import Change, Plant
from tests.planted_answers.test_planted_answers import planted_tree

_PROTOCOL = "serving/http/http1_protocol.py"
BODY_OF_UPGRADE = Plant(
    "body_of_an_upgrade_is_read_as_a_request",
    "what stands in the body of a request with `Upgrade` runs as a request of its own",
    (
        Change(
            _PROTOCOL,
            "        content_length = body_length(self._http_version, self.headers)\n",
            "        content_length = body_length(self._http_version, self.headers)\n"
            '        if any(name == b"upgrade" for name, _ in self.headers):\n'
            "            content_length = 0\n",
        ),
    ),
)
PLANTS = (
    BODY_OF_UPGRADE,
    Plant(
        "unknown_coding_is_taken_for_chunks",
        "a body whose last coding is not `chunked` is read as chunks",
        (
            Change(_PROTOCOL, 'if coding_names[-1] != b"chunked":', 'if b"chunked" not in coding_names:'),
            Change(_PROTOCOL, "if len(coding_names) > 1:", "if len(coding_names) > 2:"),
        ),
    ),
    Plant(
        "chunk_may_be_longer_than_its_size",
        "bytes behind a chunk are passed over up to the end of their line",
        (Change(_PROTOCOL, 'if chunk_line != b"\\r\\n":', 'if not chunk_line.endswith(b"\\r\\n"):'),),
    ),
)

needs_node = pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    return open_shop(tmp_path_factory.mktemp("shop"), redis_url)


@contextmanager
def planted_service(shop: Shop, plant: Plant, folder: Path) -> Iterator[Door]:
    """Run a service of the shop that has the plant."""
    tree = planted_tree(plant, folder / "tree")
    with started(shop, folder / "log", PYTHONPATH=str(tree)) as running:
        yield Door((running.host, running.port), has_bounds=True)


def test_every_plant_applies_to_the_sources(tmp_path: Path) -> None:
    for plant in PLANTS:
        assert planted_tree(plant, tmp_path / plant.name).is_dir()


@pytest.mark.storm
@needs_node
@pytest.mark.parametrize("plant", PLANTS, ids=[plant.name for plant in PLANTS])
def test_the_corpus_notices_wrong_framing(shop: Shop, judges: list[Judge], plant: Plant, tmp_path: Path) -> None:
    # Given a service with a planted defect
    with planted_service(shop, plant, tmp_path) as service:
        # When each stream of the corpus is sent, until one breaks the rule
        faults = next(filter(None, (broken(service, judges, case.stream) for case in CASES)), [])

    # Then one stream breaks the rule
    print(plant.name, faults)
    assert faults


@pytest.mark.storm
@needs_node
def test_another_caller_behind_nginx_gets_a_smuggled_answer(shop: Shop, tmp_path: Path) -> None:
    # Given a service behind nginx that runs requests hidden in the body of an upgrade
    upgrades = [case for case in CASES if "upgrade" in case.name]
    with (
        planted_service(shop, BODY_OF_UPGRADE, tmp_path) as service,
        behind_nginx(service, tmp_path / "nginx") as fronts,
    ):
        # When each stream with an upgrade is sent through nginx, and another caller sends a request after it
        noticed = [case.name for case in upgrades if is_noticed(fronts, case)]

    # Then the other caller gets a wrong answer
    print(noticed)
    assert noticed


def is_noticed(fronts: list[tuple[str, int]], case: Case) -> bool:
    """Return True if a caller behind this stream does not get its own answer, or a hidden request is answered."""
    try:
        hold_behind_nginx(fronts, [(case.name, case.stream)])
    except (AssertionError, OSError):
        return True
    return False
