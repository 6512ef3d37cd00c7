"""`larder dags install`: copies the DAG files into an Airflow's folder; never overwrites other programs' files."""

import argparse
import configparser
import contextlib
import hashlib
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from cache.errors import ConfigError
from cache.formats import THIS_RELEASE
from cache.process.command_line import install_command, json_text

PACKAGED_DAGS_FOLDER = Path(__file__).parents[2] / "dags"
LARDER_DAGS_SUBFOLDER = "larder"
"""Folder for Larder's DAGs within Airflow's."""
AIRFLOW_VERSION_MIN: Final = (3, 3)
"""First release of Airflow that has all that the DAG files import."""
AIRFLOW_VERSION_END: Final = (4,)
SCORING_POOL: Final = "gpu"
"""Airflow pool of the tasks that score: without it they wait, and Airflow does not say why."""
POOL_COMMAND: Final = f'airflow pools set {SCORING_POOL} 2 "scoring tasks"'
_HEADER_PREFIX = "# Written by `larder dags install`"

DagFileState = Literal["missing", "current", "older", "changed", "foreign"]
"""State of an installed file: `older` is from another release, `changed` was edited, `foreign` is not Larder's."""


@dataclass(frozen=True, slots=True)
class DagFile:
    """DAG file of this release, and its path in Airflow's folder."""

    source_path: Path
    target_path: Path

    def target_text(self) -> str:
        """Return the text of the target: a header line with the release and a digest of the source, then the source."""
        source_text = self.source_path.read_text()
        return (
            f"{_HEADER_PREFIX} of Larder {THIS_RELEASE} ({_text_digest(source_text)}): changes are "
            f"overwritten.\n{source_text}"
        )

    def state(self) -> DagFileState:
        """Return the current state of the target."""
        try:
            installed_text = self.target_path.read_text()
        except FileNotFoundError:
            return "missing"
        except (OSError, UnicodeDecodeError):
            return "foreign"
        header_line, _, installed_body = installed_text.partition("\n")
        if not header_line.startswith(_HEADER_PREFIX):
            return "foreign"
        if installed_text == self.target_text():
            return "current"
        return "older" if _text_digest(installed_body) in header_line else "changed"


def main(argv: Sequence[str], *, prog: str) -> int:
    """Install the DAG files; return 0; raise ConfigError before writing if a file would be overwritten.

    Files of other releases are replaced without `--force`.
    """
    args = argument_parser(prog).parse_args(argv)
    installed_airflow = airflow_version()
    if installed_airflow is not None and (reason := airflow_refusal(installed_airflow)) is not None:
        raise ConfigError(reason)
    dag_files = list(list_dag_files(dags_folder(args.folder)))
    state_by_file = {dag_file: dag_file.state() for dag_file in dag_files}
    if not args.force:
        for file, state in state_by_file.items():
            if state in ("changed", "foreign"):
                reason = "was edited" if state == "changed" else "was not written by this command"
                raise ConfigError(f"{file.target_path} {reason}: move it away, or overwrite it with --force")
    for file, state in state_by_file.items():
        if state != "current":
            _write_dag_file(file)
    if args.json:
        print(json_text({str(file.target_path): state for file, state in state_by_file.items()}))
        return 0
    for file, state in state_by_file.items():
        print(f"{file.target_path}: {'unchanged' if state == 'current' else 'written'}")
    if installed_airflow is None:
        print(
            "Airflow is not installed in this environment, so its version was not checked: the DAGs need Airflow 3.3."
        )
        print(f"Airflow's tasks need Larder in Airflow's own environment: {install_command('precompute')}.")
    print("They need LARDER_CONFIG with an absolute path, REDIS_URL, and a pool:")
    print(f"{POOL_COMMAND}. Each file says how to run it.")
    return 0


def airflow_version() -> str | None:
    """Return the installed version of Airflow, or None; read from metadata, because importing Airflow writes files."""
    for distribution_name in ("apache-airflow-core", "apache-airflow"):  # Airflow 2 has no apache-airflow-core
        try:
            return version(distribution_name)
        except PackageNotFoundError:
            continue
    return None


def airflow_refusal(installed_version: str) -> str | None:
    """Return why the DAG files cannot work with a version of Airflow, and the remedy; None if they can."""
    version_numbers = tuple(int(number) for number in re.findall(r"\d+", installed_version)[:2])
    if AIRFLOW_VERSION_MIN <= version_numbers < AIRFLOW_VERSION_END:
        return None
    return (
        f"the DAGs need Airflow 3.3, and Airflow {installed_version} is installed here: upgrade Airflow, or "
        "let it run `larder night` from a separate environment for Larder"
    )


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(prog=prog, description="Manage the DAG files that run nights in Airflow.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    install_parser = commands.add_parser(
        "install",
        help="copy the DAG files into Airflow's folder",
        description=(
            f"Copy the DAG files into {LARDER_DAGS_SUBFOLDER}/ of Airflow's folder of DAGs. "
            "Run it again after each upgrade: it replaces files of another release. If a file was edited, or was not "
            "written by this command, it is an error and nothing is written."
        ),
    )
    install_parser.add_argument(
        "folder", nargs="?", metavar="FOLDER",
        help="Airflow's folder of DAGs (default: AIRFLOW__CORE__DAGS_FOLDER, else dags in AIRFLOW_HOME)",
    )  # fmt: skip
    install_parser.add_argument("--force", action="store_true", help="overwrite edited and foreign files, too")
    install_parser.add_argument("--json", action="store_true", help="print each file with its previous state as JSON")
    return parser


def dags_folder(named_folder: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return Airflow's folder of DAGs; raise ConfigError if it is not configured, or cannot be such a folder."""
    if not (folder_path := named_folder or _configured_dags_folder(environ)):
        raise ConfigError(
            "where are Airflow's DAGs? Name the folder (larder dags install FOLDER; Airflow's default is "
            "~/airflow/dags), or set AIRFLOW__CORE__DAGS_FOLDER or AIRFLOW_HOME"
        )
    folder = Path(folder_path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} cannot be Airflow's folder of DAGs: it is a file")
    if not folder.parent.is_dir():
        origin = "" if named_folder else f", which {_folder_setting_name(environ)} names"
        raise ConfigError(
            f"{folder}{origin}, cannot be Airflow's folder of DAGs: there is no folder {folder.parent}. Is that name "
            "right, and has Airflow been set up there (`airflow db migrate`)?"
        )
    return folder


def names_dags_folder(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment names Airflow's folder of DAGs."""
    return _configured_dags_folder(environ) is not None


def _folder_setting_name(environ: Mapping[str, str]) -> str:
    return next(
        setting_name for setting_name in ("AIRFLOW__CORE__DAGS_FOLDER", "AIRFLOW_HOME") if environ.get(setting_name)
    )


def _configured_dags_folder(environ: Mapping[str, str]) -> str | None:
    if configured_folder := environ.get("AIRFLOW__CORE__DAGS_FOLDER"):
        return configured_folder
    airflow_home = environ.get("AIRFLOW_HOME")
    return str(Path(airflow_home) / "dags") if airflow_home else None


def has_scoring_pool(environ: Mapping[str, str]) -> bool | None:
    """Return whether Airflow's database has the pool; None if it is no SQLite file, or cannot be found or read.

    Asking another database would take Airflow itself, whose import lasts seconds.
    """
    if not (airflow_home := environ.get("AIRFLOW_HOME", "")):
        return None
    settings = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        settings.read(Path(airflow_home, "airflow.cfg"))
        default_url = settings.get("database", "sql_alchemy_conn", fallback=f"sqlite:///{airflow_home}/airflow.db")
        database_url = environ.get("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN") or default_url
        if not database_url.startswith("sqlite:///"):
            return None
        database_uri = f"{Path(database_url.removeprefix('sqlite:///')).absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(database_uri, uri=True, timeout=1.0)) as database:
            return bool(database.execute("SELECT 1 FROM slot_pool WHERE pool = ?", (SCORING_POOL,)).fetchall())
    except (OSError, ValueError, configparser.Error, sqlite3.Error):
        return None


def list_dag_files(airflow_folder: Path) -> Iterator[DagFile]:
    """Yield the DAG files of this release with their targets below `airflow_folder`, installed or not."""
    for source_path in sorted(PACKAGED_DAGS_FOLDER.glob("*.py")):
        if source_path.stem != "__init__":
            yield DagFile(source_path, airflow_folder / LARDER_DAGS_SUBFOLDER / source_path.name)


def _write_dag_file(dag_file: DagFile) -> None:
    dag_file.target_path.parent.mkdir(parents=True, exist_ok=True)
    part_path = dag_file.target_path.with_suffix(".part")  # not .py, because Airflow may parse the file at any time
    part_path.write_text(dag_file.target_text())
    part_path.replace(dag_file.target_path)


def _text_digest(dag_text: str) -> str:
    return hashlib.sha256(dag_text.encode()).hexdigest()[:16]
