"""Small changes that a user could see, planted one at a time into a copy of the frozen commit: each is found."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkouts import Checkout
from tests.contract.side_by_side.exposition import difference_of_metrics
from tests.contract.side_by_side.nights import differences_of_nights, run_nights
from tests.contract.side_by_side.runs import Run
from tests.contract.side_by_side.stages import await_ready
from tests.contract.side_by_side.twins import Checkouts, twins
from tests.contract.side_by_side.world import TOKENS, Shop, running_redis

pytestmark = pytest.mark.storm

COUNT = 1_500
ROUNDS_MAX = 8
"""Rounds of so many requests until a change is found: rare answers are not in each of them."""


class Change(NamedTuple):
    """Text of a file of the frozen commit, and what takes its place."""

    path: str
    original: str
    after: str

    def plant(self, folder: Path) -> None:
        """Change the file; raises AssertionError where the commit has no such text any more."""
        file = folder / self.path
        text = file.read_text()
        assert self.original in text, f"{self.path} has no {self.original!r}: plant another change"
        file.write_text(text.replace(self.original, self.after))


ANSWERS = {
    "a field renamed": Change("serving/ranking/candidate_scoring.py", '"excluded"', '"left_out"'),
    "fields in another order": Change(
        "serving/rendering/answer_fields.py", '{"id": entity.id, "table": table}', '{"table": table, "id": entity.id}'
    ),
    "an integer for a float": Change("serving/ranking/candidate_scoring.py", "return 0.0", "return 0"),
    "a score off by one bit": Change(
        "serving/ranking/candidate_scoring.py",
        '"scores": scores[order],',
        '"scores": np.nextafter(scores[order], np.float32(9)),',
    ),
    "items in another order": Change(
        "serving/ranking/candidate_scoring.py", "order = order[:k]", "order = order[:k][::-1]"
    ),
    "a flag at its edge": Change(
        "serving/rendering/answer_fields.py", '"short": len(items) < k', '"short": len(items) <= k'
    ),
    "a status": Change("serving/requests/negotiation.py", '415, "unsupported_content', '400, "unsupported_content'),
    "a code": Change("serving/requests/options.py", '"unknown_rerank"', '"no_rerank"'),
    "a header": Change("serving/requests/bodies.py", '"WWW-Authenticate"', '"WWW-Authentication"'),
    "a type of a column": Change("serving/answers/fields.py", 'int: "i4"', 'int: "f8"'),
    "a label of a metric": Change(
        "serving/metrics/registry.py", '"HTTP requests", ["route", "status"]', '"HTTP requests", ["path", "status"]'
    ),
    "the name of a metric": Change("serving/metrics/registry.py", '"larder_stale"', '"larder_is_stale"'),
    "a schema of the document": Change("serving/http/json_schema.py", '"maxLength": 256', '"maxLength": 255'),
}
"""Changes of the service."""
NIGHTS = {
    "a byte of a page": Change(
        "cache/format/records/codec.py", '"scored_at"] = scored_at', '"scored_at"] = scored_at - 1'
    ),
    "a key of --json": Change("precompute/cli/status_report.py", '"store_bytes"', '"stored_bytes"'),
    "an exit code": Change("precompute/__main__.py", "return told.code", "return told.code + 4"),
}
"""Changes of nights and commands."""


def planted(change: Change, frozen: Checkout, folder: Path) -> Checkout:
    """A copy of the frozen checkout with the change."""
    copied = shutil.copytree(frozen.root, folder, ignore=shutil.ignore_patterns("docs", "tests", "build", ".venv"))
    change.plant(copied)
    return replace(frozen, name="planted", root=copied)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_change_of_the_service_is_found(
    name: str, checkouts: Checkouts, shop: Shop, seed: int, tmp_path: Path
) -> None:
    pair = checkouts[0], planted(ANSWERS[name], checkouts[0], tmp_path / "planted")

    with twins(tmp_path, shop, pair, token=TOKENS["all"]) as twin_services:
        run = Run(twin_services, seed, shop.facts, differences_max=1)
        await_ready(twin_services)
        of_metrics = None
        for start in range(0, ROUNDS_MAX * COUNT, COUNT):
            run.send_all(range(start, start + COUNT))
            texts = [answer.body.decode() for answer in twin_services.send(twin_services.request("GET", "/metrics"))]
            of_metrics = difference_of_metrics(texts[0], texts[1])
            if run.differing or of_metrics:
                break

    print(run.differing, of_metrics)
    assert run.differing or of_metrics


@pytest.mark.parametrize("name", NIGHTS)
def test_a_change_of_the_night_or_a_command_is_found(name: str, checkouts: Checkouts, tmp_path: Path) -> None:
    pair = checkouts[0], planted(NIGHTS[name], checkouts[0], tmp_path / "planted")

    with running_redis(tmp_path / "redis-left") as left_url, running_redis(tmp_path / "redis-right") as right:
        nights = run_nights(tmp_path, pair, (left_url, right))
    changes = differences_of_nights(nights)

    print(changes)
    assert changes


def test_without_a_change_nothing_is_found(checkouts: Checkouts, tmp_path: Path) -> None:
    pair = checkouts[0], checkouts[0]

    with running_redis(tmp_path / "redis-left") as left_url, running_redis(tmp_path / "redis-right") as right:
        nights = run_nights(tmp_path, pair, (left_url, right))

    assert differences_of_nights(nights) == []
