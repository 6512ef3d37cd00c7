"""Completion scripts: made from the parsers, and read by the shells."""

import shutil
import subprocess
from pathlib import Path

import pytest

from infra.cli.__main__ import main
from infra.cli.commands import ENTRIES
from infra.cli.completion import INSTALL_LINE_BY_SHELL

pytest.importorskip("shtab")

COMPLETION_PROGRAM = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
_shtab_larder
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(params=list(INSTALL_LINE_BY_SHELL))
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, Path]:
    """A shell, and the file of its script."""
    assert main(["completion", request.param]) == 0
    file = tmp_path / f"larder.{request.param}"
    file.write_text(capsys.readouterr().out)
    return request.param, file


def test_the_shell_reads_its_script(script: tuple[str, Path]) -> None:
    shell, file = script
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")

    completed_process = subprocess.run([shell, "-n", file], capture_output=True, text=True, check=False)

    assert (completed_process.returncode, completed_process.stderr) == (0, "")


def test_every_command_is_completed(script: tuple[str, Path]) -> None:
    text = script[1].read_text()

    assert [entry.name for entry in ENTRIES if entry.name not in text] == []
    assert "--data-until" in text or "data-until" in text


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("command_line", "expected"),
    [
        ("larder st", "status"),
        ("larder erase --as ''", "user item"),
        ("larder tokens ''", "add list revoke"),
        ("larder canary ''", "start status publish abandon"),
        ("larder serve --log-", "--log-level"),
    ],
)
def test_bash_completes(script: tuple[str, Path], command_line: str, expected: str) -> None:
    bash_program = COMPLETION_PROGRAM.format(script=script[1], words=command_line)

    completed_process = subprocess.run(["bash", "-c", bash_program], capture_output=True, text=True, check=False)

    assert (completed_process.stdout.strip(), completed_process.stderr) == (expected, "")
