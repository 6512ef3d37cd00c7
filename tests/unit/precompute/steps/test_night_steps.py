"""The list of steps, and all that has to follow it."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from cache.config.timetable import NIGHT_STAGES, NIGHT_STEPS, PRELIMINARY_STEPS, SEALING_STEP, STEPS_TIMED_APART
from cache.errors import ModelFailed
from precompute.builds import reports
from precompute.cli.parser import STEPS_WITHIN_SCORE, build_command_parser
from precompute.config.settings import NightConfig
from precompute.steps import night
from precompute.steps.night import Night, StepRow

ROOT = Path(__file__).parents[4]
STEPS = ROOT / "precompute/steps"


def test_every_step_is_a_module_named_after_it() -> None:
    assert {file.stem for file in STEPS.glob("*.py")} == {
        "__init__", "night", *PRELIMINARY_STEPS, *NIGHT_STEPS,
    }  # fmt: skip
    for name in NIGHT_STEPS:
        step = import_module(f"precompute.steps.{name}")
        assert callable(step.run) and callable(step.in_night), name


def test_a_model_that_cannot_be_run_ends_a_night_by_the_name_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Night) -> StepRow:
        raise ModelFailed("user_tower.onnx cannot be run on age [2]: no such code")

    monkeypatch.setattr(night, "find_step", lambda _: fail)

    with pytest.raises(ModelFailed, match=r"^step begin: user_tower\.onnx cannot be run on age"):
        night.run_night(Night(NightConfig(device="off"), "attempt"))


def test_no_step_stands_twice_and_only_publish_follows_verify() -> None:
    assert len(set(NIGHT_STEPS)) == len(NIGHT_STEPS)
    assert NIGHT_STEPS[NIGHT_STEPS.index("verify") + 1] == "publish"
    assert ("verify",) in NIGHT_STAGES and ("publish",) in NIGHT_STAGES


def test_what_is_timed_apart_is_what_the_steps_time() -> None:
    timed = {
        str(ast.literal_eval(call.args[1]))
        for file in STEPS.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "record_step_time"
    }

    assert timed == set(STEPS_TIMED_APART)


def test_the_manifest_is_made_from_the_reports_of_the_steps_before() -> None:
    steps_before_seal = NIGHT_STEPS[: NIGHT_STEPS.index(SEALING_STEP)]
    needed_reports = [
        str(getattr(reports, call.args[0].id))
        for call in ast.walk(ast.parse((ROOT / "precompute/builds/seal.py").read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "build.need_report"
        and isinstance(call.args[0], ast.Name)
    ]

    assert {*needed_reports} == {*steps_before_seal} - {"score"}


@pytest.mark.parametrize("name", [*NIGHT_STEPS, *(step.replace("_", "-") for step in PRELIMINARY_STEPS)])
def test_every_step_has_a_command(name: str) -> None:
    about = [] if name in ("begin", "retire", "take-events") else ["20260131T000000Z-0123456789ab"]

    if name not in STEPS_WITHIN_SCORE:
        assert build_command_parser().parse_args([name, *about]).run.import_command()


@pytest.mark.parametrize(
    ("file", "after"),
    [("dags/nightly_precompute.py", "Tasks:"), ("docs/explanation/life-of-a-night.md", "## The steps")],
)
def test_documents_name_the_steps_in_their_order(file: str, after: str) -> None:
    text = (ROOT / file).read_text().partition(after)[2].partition("retire")[0] + "retire"
    normalised_text = re.sub(r"\W+", " ", text.lower())
    positions = [normalised_text.find(name.replace("_", " ")) for name in NIGHT_STEPS]

    assert -1 not in positions and positions == sorted(positions), dict(zip(NIGHT_STEPS, positions, strict=True))
