"""Environment variables that are misspelled, or of somebody else's deployment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cache.config.serving import ServingConfig
from cache.config.variables import OTHER_VARIABLES, demand_spelled_variables, setting_variables, unknown_variables
from cache.errors import ConfigError
from precompute.config.settings import night_config
from tests.unit.infra.test_environment import DOCUMENTED, SETTINGS


@pytest.mark.parametrize(
    ("misspelled", "intended"),
    [
        ("LARDER_TOKENS_FIEL", "LARDER_TOKENS_FILE"), ("LARDER_PROT", "LARDER_PORT"),
        ("LARDER_WORKRES", "LARDER_WORKERS"), ("LARDER_ARTEFACTS", "LARDER_ARTIFACTS"),
        ("LARDER_CONFG", "LARDER_CONFIG"),
    ],
)  # fmt: skip
def test_a_misspelled_variable_is_refused_by_service_and_night(misspelled: str, intended: str) -> None:
    message_pattern = f"{misspelled}: .* did you mean {intended}\\?"
    with pytest.raises(ConfigError, match=message_pattern):
        night_config(environment={misspelled: "x"})
    command = [sys.executable, "-m", "serving", "--port", "0"]
    ended = subprocess.run(
        command, env=os.environ | {misspelled: "x"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert re.search(message_pattern, ended.stderr)


def test_variables_of_a_teams_own_deployment_are_returned_and_not_refused() -> None:
    # given names that only share the prefix, including those that Kubernetes sets for a Service named larder
    environ = {
        "LARDER_IMAGE_TAG": "7", "LARDER_SERVICE_HOST": "10.0.0.1", "LARDER_PORT_8080_TCP_ADDR": "10.0.0.1",
        "LARDER_SERVICE_PORT": "8080", "LARDER_TEST_X": "1", "LARDER_PROT": "", "PATH": "/bin",
    }  # fmt: skip

    # then only the first is reported as unknown; an empty variable counts as not set
    assert unknown_variables(environ) == ["LARDER_IMAGE_TAG"]
    demand_spelled_variables(environ)
    assert ServingConfig.load(environ).port == ServingConfig().port


def test_all_variables_of_settings_and_of_the_page_are_known() -> None:
    documented = {name for name in DOCUMENTED if name.startswith("LARDER_") and not name.startswith("LARDER_TEST_")}

    assert setting_variables() >= SETTINGS
    assert documented <= OTHER_VARIABLES
    # then no variable is so similar to another that setting it would count as a misspelling
    assert unknown_variables(dict.fromkeys(OTHER_VARIABLES | setting_variables(), "x")) == []


def test_check_names_variables_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.cli.check import _check_settings

    settings_file = tmp_path / "larder.toml"
    settings_file.write_text("")
    monkeypatch.setenv("LARDER_CONFIG", str(settings_file))
    monkeypatch.setenv("LARDER_IMAGE_TAG", "7")
    monkeypatch.delenv("LARDER_SEED", raising=False)

    assert _check_settings() == ("ok", f"{settings_file}; not read: LARDER_IMAGE_TAG")
