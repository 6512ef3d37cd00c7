"""The command `freshness`, as a shell runs it."""

import numpy as np
import orjson
import pytest

from precompute.__main__ import main
from tests.unit.precompute.evaluation.planted import make_earlier_rows, write
from tests.unit.precompute.evaluation.test_replay import jumping


@pytest.fixture
def replay_arguments(tmp_path, monkeypatch):
    """Words that replay a planted log's last day."""
    monkeypatch.setattr("precompute.__main__._set_interrupt_handler", lambda _handler: None)
    write(tmp_path, jumping(np.random.default_rng(0)))
    (tmp_path / "larder.toml").write_text("[reference]\nchoose = false\ndims = 20\n")
    monkeypatch.chdir(tmp_path)
    return ["freshness", "--config", "larder.toml", "--data", "log.parquet", "--days", "1"]


def test_programs_get_json(replay_arguments, capsys):
    assert main([*replay_arguments, "--json", "--k", "10", "--seed", "3"]) == 0

    report = orjson.loads(capsys.readouterr().out)
    assert (report["k"], report["seed"], report["days"], report["users"]) == (10, 3, 1, 300)
    assert report["cut"] == "2026-03-12T00:00:00" and report["trained"] == "on what is before the cut"
    first = report["groups"][0]
    assert first["group"] == "all" and first["targets"] == 500
    assert set(first["recall"]) == {"night", "night_less", "hourly", "events"}
    assert set(first["gain"]) == {"night_less", "hourly", "events"}
    low, value, high = (first["gain"]["events"][name] for name in ("low", "value", "high"))
    assert 0.5 < low < value < high
    assert [cost["way"] for cost in report["costs"]] == ["night", "hourly", "events"]


def test_people_get_tables(replay_arguments, capsys):
    assert main(replay_arguments) == 0

    output = capsys.readouterr().out
    for text in ("300 users, 200 items, 2,000 interactions", "recall@20", "NDCG@20", "a night an hour",
                 "12 to 24 h since the night", "lists a day, where inputs changed"):  # fmt: skip
        assert text in output


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--days", "0", "--days must be 1 to 3650, not 0"),
        ("--k", "1001", "--k must be 1 to 1000, not 1001"),
        ("--users", "-1", "--users must be 1 to"),
        ("--seed", "-1", "--seed must be 0 to"),
        ("--data", "nothing.csv", "nothing.csv"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(replay_arguments, option, value, line, capsys):
    assert main([*replay_arguments, option, value]) == 1

    error_output = capsys.readouterr().err
    assert line in error_output and "Traceback" not in error_output


def test_the_configured_bundle_may_be_replayed(replay_arguments, tmp_path, capsys):
    rows, _ = make_earlier_rows(np.random.default_rng(0), users=300, groups=20, size=10, items_per_user=5)
    (tmp_path / "earlier").mkdir()
    write(tmp_path / "earlier", rows)
    (tmp_path / "earlier/larder.toml").write_text(
        'artifacts = "store"\nbundle = "bundle"\n[reference]\nchoose = false\ndims = 20\n'
        '[sources]\ninteractions = ["log.parquet"]\n'
    )
    assert main(["train", "--config", "earlier/larder.toml", "--json"]) == 0
    capsys.readouterr()

    arguments = [*replay_arguments, "--bundle", "earlier/bundle", "--configured-bundle", "--json"]
    assert main(arguments) == 0

    report = orjson.loads(capsys.readouterr().out)
    assert report["trained"] == "as configured"
    assert report["groups"][0]["gain"]["events"]["low"] > 0.5
