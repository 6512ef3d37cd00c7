"""How the night's tasks are tried: read from the configuration without anything heavy."""

from datetime import timedelta
from pathlib import Path

import pytest

from cache.config.timetable import DagConfig
from cache.errors import ConfigError
from precompute.config.settings import NightConfig


def written(folder: Path, text: str) -> dict[str, str]:
    path = folder / "larder.toml"
    path.write_text(text)
    return {"LARDER_CONFIG": str(path)}


def test_without_a_file_the_defaults_hold() -> None:
    assert DagConfig.configured({}) == DagConfig()
    assert DagConfig().default_task_arguments()["retry_delay"] == timedelta(seconds=10)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    environ = written(tmp_path, "[dag]\nretries = 2\nretry_delay_s = 30.0\n")

    assert DagConfig.configured(environ).retry_delay_s == 30.0
    dag_config = DagConfig.configured({**environ, "LARDER_RETRY_DELAY_S": "1"})
    assert (dag_config.retries, dag_config.retry_delay_s) == (2, 1.0)


def test_night_and_dag_read_the_same_section(tmp_path: Path) -> None:
    environ = written(tmp_path, "[dag]\nverify_timeout_s = 50000.0\n")

    night = NightConfig.configured({}, Path(environ["LARDER_CONFIG"]))

    assert night.dag == DagConfig.configured(environ) == DagConfig(verify_timeout_s=50_000.0)


@pytest.mark.parametrize(
    ("text", "message_pattern"),
    [
        ("[dag]\nretires = 2\n", "unknown setting 'retires'; did you mean retries\\? known are load_timeout_s"),
        ("[dag]\nload_timeout_s = 0.0\n", "load_timeout_s"),
        ("[dag]\nretries = 'two'\n", "retries must be"),
        ("dag = 5\n", "must be a section"),
        ("[dag", "cannot read"),
    ],
)
def test_what_cannot_be_meant_is_named(tmp_path: Path, text: str, message_pattern: str) -> None:
    with pytest.raises(ConfigError, match=message_pattern):
        DagConfig.configured(written(tmp_path, text))


def test_a_delay_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="LARDER_RETRY_DELAY_S: retry_delay_s must be a finite number, not 'soon'"):
        DagConfig.configured({"LARDER_RETRY_DELAY_S": "soon"})
