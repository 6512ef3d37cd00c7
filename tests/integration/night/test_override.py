"""A legitimate change that a gate stops has a way through: recorded, with a reason, and only for what may be judged."""

from pathlib import Path

import pytest

from cache.errors import ConfigError, Conflict, LarderError, Refused
from cache.store.artefacts import read_manifest
from cache.store.releases import all_releases
from precompute.__main__ import main
from precompute.cli.override import override
from precompute.config.settings import NightConfig
from precompute.steps import publish, verify
from tests.integration.bad_inputs import on_another_scale
from tests.integration.corpus import build, cut_at, failed, judged
from tests.integration.nights import prepare, publish_night

Refusal = tuple[NightConfig, str]


@pytest.fixture
def refused(tmp_path: Path, redis_url: str) -> Refusal:
    """A night whose bundle scores on another scale than the live one's: refused by score_psi alone."""
    config = prepare(tmp_path / "night", redis_url, users=200, items=80)
    publish_night(config, cut_at(config, 0.85))
    (tmp_path / "scaled").mkdir()
    scaled = on_another_scale(config, tmp_path / "scaled")
    generation = build(scaled, cut_at(config, 0.9))
    assert failed(judged(scaled, generation)) == {"score_psi"}
    return scaled, generation


def test_an_overridden_rule_passes_once_more_verified_and_the_reason_is_kept(refused: Refusal) -> None:
    config, generation = refused
    with pytest.raises(Conflict, match="refused"):
        publish.run(config, {"generation": generation}, attempt="too-early")

    override(config, generation, rule="score_psi", reason="the new scale is agreed", attempt="a")
    with pytest.raises(Conflict, match="refused"):
        publish.run(config, {"generation": generation}, attempt="not-verified-again")
    verify.run(config, {"generation": generation})
    publish.run(config, {"generation": generation}, attempt="b")

    verdicts = {gate["rule"]: gate for gate in read_manifest(config.store(), generation).gates}
    assert verdicts["score_psi"]["passed"] and verdicts["score_psi"]["value"] > 1
    assert verdicts["score_psi"]["overridden"] == "the new scale is agreed"
    override_record = next(release for release in all_releases(config.store()) if release.action == "override")
    assert (override_record.generation, override_record.rule) == (generation, "score_psi")
    assert override_record.reason == "the new scale is agreed"


def test_only_what_a_rule_has_refused_can_be_overridden(refused: Refusal) -> None:
    config, generation = refused
    with pytest.raises(Conflict, match=r"list_jaccard has not refused .*: the failed rules are score_psi"):
        override(config, generation, rule="list_jaccard", reason="wrong one", attempt="a")
    with pytest.raises(Refused, match="score_psi"):
        verify.run(config, {"generation": generation})
    passed = build(config, cut_at(config, 0.95))  # last: the next night replaces what was refused
    with pytest.raises(Conflict, match="no rule of it failed"):
        override(config, passed, rule="score_psi", reason="beforehand", attempt="a")


def test_an_override_needs_a_reason_a_rule_and_a_generation(refused: Refusal) -> None:
    config, generation = refused
    for arguments, error, message in (
        ((generation, "score_psi", "  "), ConfigError, "reason"),
        ((generation, "finite", "x"), Refused, "cannot be overridden"),
        ((generation, "nothing", "x"), Refused, "no rule"),
        (("20260101T000000Z-000000000000", "score_psi", "x"), LarderError, "20260101"),
    ):
        with pytest.raises(error, match=message):
            override(config, arguments[0], rule=arguments[1], reason=arguments[2], attempt="a")


def test_the_command_that_a_refusal_names_is_the_one_that_works(
    refused: Refusal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, generation = refused
    monkeypatch.setenv("REDIS_URL", str(config.redis_url))
    location_arguments = ["--artifacts", str(config.path(config.artifacts)), "--state", str(config.path(config.state))]
    common = ["--quiet", "--namespace", config.namespace, *location_arguments]

    code = main([*common, "override", generation, "--rule", "score_psi", "--reason", "a new scale"])

    assert code == 0 and "score_psi" in capsys.readouterr().out
    assert verify.run(config, {"generation": generation})["verified"]
    assert main([*common, "override", generation, "--rule", "finite", "--reason", "x"]) == 1
    assert "integrity" in capsys.readouterr().err.replace("\n", " ")
