"""The frozen commit and this tree give the same night, and the same answers to 2,000 requests."""

import re
from collections.abc import Iterator

import orjson
import pytest

from tests.contract.side_by_side.commands import difference_of_outcomes
from tests.contract.side_by_side.differences import differences_of_values
from tests.contract.side_by_side.exposition import difference_of_metrics
from tests.contract.side_by_side.runs import Run
from tests.contract.side_by_side.stages import await_ready, begin_trials
from tests.contract.side_by_side.twins import Checkouts, twins
from tests.contract.side_by_side.world import TOKENS, Nights, Shop

COUNT = 2_000
INTERNAL = re.compile(r"(work|times)/")
"""Files of a night that only the steps of that night read."""
MOMENTARY = re.compile(r"\.(created_at|user_s|note|speedup_\w+|timings\.\w+)$")
"""Fields of a manifest that say when it was made, how long that took, and how full Redis was."""


@pytest.fixture(scope="module")
def run(
    checkouts: Checkouts, shop: Shop, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """A run of 2,000 requests, the second half while an experiment and a canary go on."""
    folder = tmp_path_factory.mktemp("twins")
    with twins(folder, shop, checkouts, token=TOKENS["all"]) as pair:
        run = Run(pair, seed, shop.known)
        await_ready(pair)
        run.ask(range(COUNT // 2))
        begin_trials(pair)
        run.ask(range(COUNT // 2, COUNT))
        yield run


def test_both_give_the_same_answers(run: Run) -> None:
    print(run.met)

    run.check()

    assert sum(run.met.kinds.values()) == COUNT


def test_metrics_have_the_same_names_types_and_labels(run: Run) -> None:
    left, right = run.twins.ask(run.twins.request("GET", "/metrics"))

    assert left.headers[1:] == right.headers[1:] or left.header("content-type") == right.header(
        "content-type"
    )
    found = difference_of_metrics(left.body.decode(), right.body.decode())
    assert found is None, str(found)


def test_a_night_writes_the_same_bytes(nights: Nights) -> None:
    left, right = nights.files(0), nights.files(1)
    manifests = [orjson.loads(files.pop("manifest.json")) for files in (left, right)]

    published = [{path for path in files if not INTERNAL.match(path)} for files in (left, right)]
    assert published[0] == published[1]
    assert [path for path in sorted(published[0]) if left[path] != right[path]] == []
    found = [
        str(difference)
        for difference in differences_of_values(manifests[0], manifests[1], "manifest")
        if not MOMENTARY.search(difference.place)
    ]
    assert found == []


def test_a_night_and_status_say_the_same_to_programs(nights: Nights) -> None:
    for left, right in zip(*nights.outcomes, strict=True):
        assert (left.code, right.code) == (0, 0), (left.errors, right.errors)
        found = difference_of_outcomes(left, right)
        assert found is None, f"larder {' '.join(left.words)}: {found}"
