"""A publish after a restart of a Redis node reads every page back, beside those who read there."""

from pathlib import Path

import pytest

from precompute.bulk.governor import Governor
from precompute.steps import publish
from tests.integration.nights import DATA_UNTIL, build_verified, prepare


def test_pages_are_read_back_at_the_pace_of_the_governor(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepare(tmp_path, redis_url, users=60, items=40)
    generation = build_verified(config, DATA_UNTIL)
    paced: list[int] = []
    monkeypatch.setattr("precompute.releases.replication.run_ids", lambda _client: {"primary": "restarted"})
    monkeypatch.setattr(Governor, "pace", lambda _governor, size: paced.append(size))

    publish.run(config, {"generation": generation}, attempt="a")

    assert sum(paced) > 0
