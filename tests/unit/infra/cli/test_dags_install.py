"""`larder dags install`: the DAG files in an Airflow's folder, and nobody else's file touched."""

import ast
import contextlib
import importlib.metadata
import json
import sqlite3
from pathlib import Path

import pytest

from cache.config.night import NightConfig
from infra.cli.__main__ import main
from infra.cli.check import CHECK_BY_SUBJECT
from infra.cli.dags import PACKAGED_DAGS_FOLDER

NAMES = sorted(file.name for file in PACKAGED_DAGS_FOLDER.glob("*.py") if file.stem != "__init__")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "airflow" / "dags"


def install(folder: Path, *more: str) -> int:
    folder.parent.mkdir(exist_ok=True)
    return main(["dags", "install", str(folder), *more])


def states(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> set[str]:
    capsys.readouterr()
    assert install(folder, "--json", *more) == 0
    return set(json.loads(capsys.readouterr().out).values())


def test_every_dag_file_is_written_and_keeps_its_docstring(folder: Path) -> None:
    assert install(folder) == 0

    written = sorted((folder / "larder").iterdir())
    assert [installed_file.name for installed_file in written] == NAMES
    for installed_file in written:
        trees = [ast.parse(file.read_text()) for file in (installed_file, PACKAGED_DAGS_FOLDER / installed_file.name)]
        assert ast.dump(trees[0]) == ast.dump(trees[1])


def test_it_may_be_run_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert states(folder, capsys) == {"missing"}
    mtime_ns_by_file = {file: file.stat().st_mtime_ns for file in (folder / "larder").iterdir()}

    assert states(folder, capsys) == {"current"}
    assert mtime_ns_by_file == {file: file.stat().st_mtime_ns for file in (folder / "larder").iterdir()}


def test_a_file_of_an_older_release_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as older:
        older.setattr("infra.cli.dags.THIS_RELEASE", "0.0.1")
        install(folder)

    assert states(folder, capsys) == {"older"}
    assert states(folder, capsys) == {"current"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: f"{text}# mine\n", "was edited"),
        (lambda text: text.partition("\n")[2], "was not written by this command"),
    ],
)
def test_a_foreign_file_is_refused_and_nothing_is_written(
    folder: Path, change, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install(folder)
    last = folder / "larder" / NAMES[-1]
    last.write_text(change(last.read_text()))
    (folder / "larder" / NAMES[0]).unlink()
    capsys.readouterr()

    assert install(folder) == 2

    assert capsys.readouterr().err == (f"larder: {last} {reason}: move it away, or overwrite it with --force\n")
    assert not (folder / "larder" / NAMES[0]).exists()
    assert states(folder, capsys, "--force") >= {"missing", "current"}
    assert states(folder, capsys) == {"current"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"AIRFLOW_HOME": "{tmp}/home"}, "home/dags"),
        ({"AIRFLOW_HOME": "{tmp}/home", "AIRFLOW__CORE__DAGS_FOLDER": "{tmp}/other"}, "other"),
    ],
)
def test_airflows_own_variables_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    (tmp_path / "home").mkdir()
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))

    assert main(["dags", "install"]) == 0

    assert (tmp_path / expected / "larder" / NAMES[0]).is_file()


def test_a_folder_that_cannot_be_airflows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AIRFLOW_HOME", "AIRFLOW__CORE__DAGS_FOLDER"):
        monkeypatch.delenv(name, raising=False)

    assert main(["dags", "install", str(tmp_path / "no" / "dags")]) == 2
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err
    assert main(["dags", "install"]) == 2
    assert "AIRFLOW_HOME" in capsys.readouterr().err


def has_airflow(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    """Let the metadata of this environment tell of one Airflow, or of none."""
    distribution = importlib.metadata.distribution

    def find_distribution(name: str) -> importlib.metadata.Distribution:
        is_core = name == "apache-airflow-core"
        if not is_core and name != "apache-airflow":
            return distribution(name)
        if installed is None or (is_core and installed.startswith("2.")):
            raise importlib.metadata.PackageNotFoundError(name)
        return type("Installed", (), {"version": installed})()  # type: ignore[no-any-return]

    monkeypatch.setattr(importlib.metadata, "distribution", find_distribution)


@pytest.mark.parametrize("installed", ["2.10.5", "2.11.0", "3.0.6", "3.1.8", "3.2.1", "4.0.0"])
def test_an_airflow_that_cannot_run_the_dags_is_refused_and_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: str
) -> None:
    has_airflow(monkeypatch, installed)

    assert install(folder, "--force") == 2

    error_text = capsys.readouterr().err
    assert f"need Airflow 3.3, and Airflow {installed} is installed here" in error_text
    assert "`larder night`" in error_text and error_text.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize("installed", ["3.3.0rc1", "3.3.2", "3.4.0", None])
def test_an_airflow_that_runs_the_dags_gets_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: str | None
) -> None:
    has_airflow(monkeypatch, installed)

    assert install(folder) == 0

    assert ("version was not checked" in capsys.readouterr().out) == (installed is None)


@pytest.mark.parametrize(
    ("installed", "state"), [("2.11.0", "to do"), ("3.1.8", "to do"), ("3.2.1", "to do"), ("3.3.2", "ok")]
)
def test_check_says_which_airflow_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, installed: str, state: str
) -> None:
    install(folder)
    monkeypatch.setenv("AIRFLOW__CORE__DAGS_FOLDER", str(folder))
    has_airflow(monkeypatch, installed)

    actual_state, message = CHECK_BY_SUBJECT["airflow"](NightConfig())

    assert actual_state == state and f"Airflow {installed}" in message


def test_check_names_an_airflow_that_no_dags_were_copied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIRFLOW_HOME", "AIRFLOW__CORE__DAGS_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    has_airflow(monkeypatch, "2.10.5")

    state, message = CHECK_BY_SUBJECT["airflow"](NightConfig())

    assert state == "not used" and "Airflow 2.10.5" in message and "larder night" in message


def test_check_names_the_folder_of_an_airflow_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW__CORE__DAGS_FOLDER", raising=False)
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "mistyped"))
    has_airflow(monkeypatch, "3.3.2")

    state, message = CHECK_BY_SUBJECT["airflow"](NightConfig())

    assert state == "to do" and f"there is no folder {tmp_path / 'mistyped'}" in message


def test_check_names_the_option_that_replaces_an_edited_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_airflow(monkeypatch, "3.3.2")
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    assert main(["dags", "install"]) == 0
    edited_file = tmp_path / "dags" / "larder" / NAMES[0]
    edited_file.write_text(f"{edited_file.read_text()}# mine\n")

    assert CHECK_BY_SUBJECT["airflow"](NightConfig()) == (
        "to do", f"{edited_file}: edited since its installation; `larder dags install --force`"
    )  # fmt: skip
    assert main(["dags", "install"]) == 2 and main(["dags", "install", "--force"]) == 0


@pytest.mark.parametrize(
    ("pools", "state", "told"),
    [
        (["default_pool"], "to do", "airflow pools set gpu"),
        (["default_pool", "gpu"], "ok", "with the pool gpu"),
        (None, "ok", "airflow pools list"),
    ],
)
def test_check_looks_for_the_pool_of_scoring_tasks_where_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: list[str] | None, state: str, told: str
) -> None:
    # given an Airflow on one host, or one whose database is a server
    for name in ("AIRFLOW__CORE__DAGS_FOLDER", "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    has_airflow(monkeypatch, "3.3.2")
    (tmp_path / "dags").mkdir()
    install(tmp_path / "dags")
    if pools is None:
        (tmp_path / "airflow.cfg").write_text("[database]\nsql_alchemy_conn = postgresql://u:50%@db/airflow\n")
    with contextlib.closing(sqlite3.connect(tmp_path / "airflow.db")) as database:
        database.execute("CREATE TABLE slot_pool (pool TEXT)")
        database.executemany("INSERT INTO slot_pool VALUES (?)", [(pool,) for pool in pools or ()])
        database.commit()

    actual_state, message = CHECK_BY_SUBJECT["airflow"](NightConfig())

    assert (actual_state, told in message) == (state, True)
