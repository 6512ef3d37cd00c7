import os
import pwd
from pathlib import Path

import pytest

from cache.errors import ConfigError
from infra.celery import airflow
from infra.celery.__main__ import main
from infra.celery.airflow import find_postgres, postgres_account


def programs(folder: Path) -> Path:
    """A folder that looks like one of PostgreSQL's."""
    folder.mkdir(parents=True)
    for name in ("initdb", "postgres"):
        (folder / name).touch()
    return folder


def test_the_postgresql_of_path_is_taken_first_else_debians_newest(tmp_path: Path) -> None:
    debian = tmp_path / "debian"
    for version in ("9", "15", "17"):
        programs(debian / version / "bin")
    postgres_folder = programs(tmp_path / "ours")

    assert find_postgres({"PATH": f"/nowhere:{postgres_folder}"}, debian) == postgres_folder
    assert find_postgres({"PATH": "/nowhere"}, debian) == debian / "17/bin"


def test_without_a_postgresql_it_is_said_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="apt-get install postgresql"):
        find_postgres({"PATH": str(tmp_path)}, tmp_path)


def test_postgresql_runs_as_ourselves_or_as_its_own_user_where_we_are_root() -> None:
    account = next(account for account in pwd.getpwall() if account.pw_uid != 0)

    assert postgres_account(account.pw_uid) == account
    assert postgres_account(0, account.pw_name) == account
    with pytest.raises(ConfigError, match="useradd --system no-such-user"):
        postgres_account(0, "no-such-user")


def test_a_package_that_is_not_there_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(airflow, "_PACKAGES", ("celery", "no-such-package"))

    code = main(["--state", str(tmp_path / "s")])

    assert code == 2
    assert "no-such-package is not installed: `make env`" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_airflows_own_settings_of_the_surroundings_do_not_choose_the_database() -> None:
    environment = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "sqlite:///production.db",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "5",
    }

    airflow_settings = airflow.celery_settings("redis://broker", "postgresql+psycopg2://ours", environment)

    assert airflow_settings["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] == "postgresql+psycopg2://ours"
    assert airflow_settings["AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT"] == "5"


def test_folders_of_the_environment_do_not_depend_on_where_a_task_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"LARDER_ARTIFACTS": "here", "LARDER_STATE": "s3://there", "LARDER_NAMESPACE": "x"}

    assert airflow.absolute_folders(environment) == {
        "LARDER_ARTIFACTS": os.fspath(tmp_path / "here"),
        "LARDER_STATE": "s3://there",
    }
