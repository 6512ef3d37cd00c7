"""The frozen commit and this tree give the same night, and the same answers to 2,000 requests."""

from collections.abc import Iterator

import pytest

from tests.contract.side_by_side.differences import Difference
from tests.contract.side_by_side.exposition import difference_of_metrics
from tests.contract.side_by_side.nights import Nights, differences_of_nights
from tests.contract.side_by_side.runs import Run
from tests.contract.side_by_side.stages import await_ready, begin_trials
from tests.contract.side_by_side.twins import Checkouts, twins
from tests.contract.side_by_side.world import TOKENS, Shop
from tests.polling import poll_until

COUNT = 2_000


@pytest.fixture(scope="module")
def run(checkouts: Checkouts, shop: Shop, seed: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of 2,000 requests, the second half while an experiment and a canary go on."""
    folder = tmp_path_factory.mktemp("twins")
    with twins(folder, shop, checkouts, token=TOKENS["all"]) as pair:
        run = Run(pair, seed, shop.facts)
        await_ready(pair)
        run.send_all(range(COUNT // 2))
        begin_trials(pair)
        run.send_all(range(COUNT // 2, COUNT))
        yield run


def test_both_give_the_same_answers(run: Run) -> None:
    print(run.met)

    run.check()

    assert sum(run.met.kinds.values()) == COUNT


def test_metrics_have_the_same_names_types_and_labels(run: Run) -> None:
    """Once both have looked at the history of releases, which each does at its own moments."""
    metric_differences: list[Difference | None] = []

    def is_same() -> bool:
        left_answer, right = run.twins.send(run.twins.request("GET", "/metrics"))
        assert left_answer.header("content-type") == right.header("content-type")
        metric_differences.append(difference_of_metrics(left_answer.body.decode(), right.body.decode()))
        return metric_differences[-1] is None

    assert poll_until(is_same, every_s=0.2), str(metric_differences[-1])


def test_both_have_the_same_night(nights: Nights) -> None:
    """Bytes of pages, directories, items and defaults, fields of the manifest, and what programs are told."""
    assert [outcome.code for side in nights.outcomes for outcome in side] == [0, 0, 0, 3]
    assert len(nights.files(0)) > 50

    assert differences_of_nights(nights) == []
