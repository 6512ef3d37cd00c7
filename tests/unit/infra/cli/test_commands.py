"""`larder`: its help, its table of commands, and the line that it prints where it cannot go on."""

import argparse
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from cache.formats import THIS_RELEASE
from infra.cli.__main__ import main
from infra.cli.commands import ENTRIES, ENTRY_BY_NAME, GROUPS, MODULES_BY_EXTRA, NIGHT_COMMANDS_MODULE, help_page
from infra.cli.night_commands import parsers_by_command
from serving.__main__ import _MODULE_BY_COMMAND
from tests.unit.test_layering import ROOT

HIDDEN = """
import runpy, sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden!r}:
            raise ModuleNotFoundError(name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {hidden!r} else found(name, package)
sys.meta_path.insert(0, Hide())
sys.argv = ["larder", *{words!r}]
from infra.cli.__main__ import main
sys.exit(main())
"""


def run(*arguments: str, cwd: Path = ROOT, **environ: str) -> "subprocess.CompletedProcess[str]":
    """The command as a program of its own, without settings from outside."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    environment.pop("REDIS_URL", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**environment, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def without(*hidden: str, arguments: tuple[str, ...], cwd: Path) -> "subprocess.CompletedProcess[str]":
    """The command on a machine that lacks some modules."""
    return run("-c", HIDDEN.format(hidden=hidden, words=arguments), cwd=cwd)


def test_the_help_fits_a_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    page_words = help_page().replace(",", " ").split()
    assert [entry.name for entry in ENTRIES if entry.name not in page_words] == []


def test_without_a_command_the_help_is_printed_and_it_is_wrong_usage() -> None:
    assert main([]) == 2


def test_the_version_is_that_of_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0

    assert capsys.readouterr().out == f"larder {THIS_RELEASE}\n"


def test_a_command_stands_once_and_in_a_group_of_the_help() -> None:
    assert len(ENTRY_BY_NAME) == len(ENTRIES)
    assert {entry.group_title for entry in ENTRIES} == set(GROUPS)
    groups = [entry.group_title for entry in ENTRIES]
    assert groups == sorted(groups, key=GROUPS.index)
    assert {extra for entry in ENTRIES for extra in entry.required_extras} == set(MODULES_BY_EXTRA)


def test_the_page_has_every_command() -> None:
    rows = (ROOT / "docs/reference/command-line.md").read_text().partition("## Commands")[2]
    documented_names = {name.split()[0] for name in re.findall(r"`([^`]+)`", rows.partition("\n## ")[0])}

    assert set(ENTRY_BY_NAME) <= documented_names


def test_every_command_of_the_modules_can_be_reached() -> None:
    assert {entry.name for entry in ENTRIES if entry.module_name == NIGHT_COMMANDS_MODULE} == set(
        parsers_by_command("larder")
    )
    assert set(_MODULE_BY_COMMAND.items()) <= {(entry.name, entry.module_name) for entry in ENTRIES}


WATCHED = {"demo", "redis", "completion", "serve"}
"""Commands whose output is for whoever watches them, or is no finding."""


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A command's parsers that have no commands of their own."""
    choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [
        leaf for parser_by_name in choices for subparser in parser_by_name.values() for leaf in leaves(subparser)
    ] or [parser]


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES if entry.name not in WATCHED])
def test_a_command_tells_programs_in_json(name: str) -> None:
    parser = import_module(ENTRY_BY_NAME[name].module_name).argument_parser(f"larder {name}")

    for leaf in leaves(parser):
        assert "--json" in leaf._option_string_actions, leaf.prog


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES if entry.name != "completion"])
def test_a_command_shows_its_help_under_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])

    assert exit_info.value.code == 0
    help_text = capsys.readouterr().out
    assert help_text.startswith(f"usage: larder {name} ")
    assert "python -m precompute" not in help_text.partition("\n\n")[0]


def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from infra.cli.__main__ import main; main(['--help']); "
        "print(sorted({'numpy', 'pyarrow', 'airflow', 'pydantic', 'redis', 'orjson', 'rich'} & sys.modules.keys()))"
    )

    assert run("-c", code).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nigth",), "larder: there is no command 'nigth': did you mean night?"),
        (("rollback",), "larder: there is no command 'rollback': did you mean roll-back?"),
        (("xyzzy",), "larder: there is no command 'xyzzy': larder --help lists all commands"),
        (("--versoin",), "larder: there is no option '--versoin': did you mean --version?"),
    ],
)
def test_what_is_not_known_is_named_with_the_nearest(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    ("hidden", "arguments", "end"),
    [
        (("pyarrow",), ("night",), "needs pyarrow, not installed here: {install}[precompute]'"),
        (("onnx", "scipy"), ("init",), "needs onnx, scipy, not installed here: {install}[precompute]'"),
        (("rich",), ("top",), "larder top needs rich, not installed here: {install}[top]'"),
        (("shtab",), ("completion", "zsh"), "needs shtab, not installed here: {install}[completion]'"),
        (("fastapi", "uvicorn"), ("serve",), "needs fastapi, uvicorn, not installed here: {install}[serving]'"),
        (("airflow", "httpx"), ("demo",), "airflow, httpx, not installed here: {install}[airflow,client]'"),
    ],
)  # fmt: skip
def test_an_extra_that_is_missing_is_named(
    tmp_path: Path, hidden: tuple[str, ...], arguments: tuple[str, ...], end: str
) -> None:
    completed_process = without(*hidden, arguments=arguments, cwd=tmp_path)

    assert (completed_process.returncode, completed_process.stdout) == (2, "")
    end = end.format(install="pip install 'larder-predictions")
    assert completed_process.stderr.endswith(f"{end}\n") and completed_process.stderr.count("\n") == 1


SERVICE = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client")


@pytest.mark.parametrize(
    "arguments", [("night", "--help"), ("status", "--help"), ("dags", "--help"), ("check", "--json")]
)
def test_a_host_of_nights_needs_nothing_of_the_service(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "larder.toml").write_text('namespace = "shop"\n')

    completed_process = without(*SERVICE, arguments=arguments, cwd=tmp_path)

    assert (completed_process.returncode, completed_process.stderr) == (3 if arguments[0] == "check" else 0, "")


@pytest.mark.parametrize("module", ["serving.client", "precompute.steps.night", "dags.canary"])
def test_the_client_and_the_night_load_without_a_web_framework(tmp_path: Path, module: str) -> None:
    import_code = f"import sys; sys.meta_path.insert(0, Hide()); import {module}"
    hide = HIDDEN.partition("import importlib.util")[0].format(hidden=SERVICE)

    completed_process = run("-c", hide + import_code, cwd=tmp_path)

    assert (completed_process.returncode, completed_process.stderr) == (0, "")


def test_the_program_of_the_service_names_its_extra(tmp_path: Path) -> None:
    program = HIDDEN.partition("sys.argv")[0] + "runpy.run_module('serving', run_name='__main__')"

    completed_process = run("-c", program.format(hidden=("uvicorn",)), cwd=tmp_path)

    assert completed_process.returncode == 2 and completed_process.stderr.count("\n") == 1
    assert completed_process.stderr.endswith("not installed here: pip install 'larder-predictions[serving]'\n")


@pytest.mark.parametrize("arguments", [("serve", "--help"), ("tokens", "--help"), ("check", "--json")])
def test_a_serving_host_needs_nothing_of_the_night(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "larder.toml").write_text('namespace = "shop"\n')

    completed_process = without("onnx", "pyarrow", "rich", "scipy", "airflow", arguments=arguments, cwd=tmp_path)

    assert (completed_process.returncode, completed_process.stderr) == (0, "")


@pytest.mark.parametrize("config_location", ["here", "variable", "before", "behind"])
def test_the_settings_are_found(tmp_path: Path, config_location: str) -> None:
    file = tmp_path / ("larder.toml" if config_location == "here" else "shop.toml")
    file.write_text('namespace = "no name"\n')
    environ = {"LARDER_CONFIG": str(file)} if config_location == "variable" else {}
    arguments_by_location = {"before": ["--config", str(file), "status"], "behind": ["status", f"--config={file}"]}

    completed_process = run(
        "-m", "infra.cli", *arguments_by_location.get(config_location, ["status"]), cwd=tmp_path, **environ
    )

    assert completed_process.returncode == 1
    assert str(file.name) in completed_process.stderr and "no name" in completed_process.stderr


def test_what_stands_after_a_command_reaches_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    received_arguments: list[str] = []

    def record_arguments(arguments: list[str], *, prog: str) -> int:
        received_arguments.extend([prog, *arguments])
        return 7

    monkeypatch.setattr("infra.cli.check.main", record_arguments)

    assert main(["check", "--reason", "a b", "-x", "--", "--json"]) == 7
    assert received_arguments == ["larder check", "--reason", "a b", "-x", "--", "--json"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Denied", "x"), 1, "larder: this machine refused: [Errno 13] Denied: 'x'"),
        (ZeroDivisionError("by zero"), 1, "larder: internal error: ZeroDivisionError: by zero"),
    ],
)  # fmt: skip
def test_no_error_is_a_traceback(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_arguments: list[str], *, prog: str) -> int:
        raise error

    monkeypatch.setattr("infra.cli.check.main", fail)

    assert main(["check"]) == code
    error_line = capsys.readouterr().err
    assert error_line.startswith(line) and error_line.count("\n") == 1


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    slow = (
        f"import infra.cli.check as c; c.main = lambda words, *, prog: exec({code!r}) or 0; "
        "import sys; from infra.cli.__main__ import main; sys.exit(main(['check']))"
    )

    completed_process = run("-c", slow, cwd=tmp_path)

    assert (completed_process.returncode, completed_process.stderr) == (130, "interrupted\n")
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
