"""`larder dags install`: copies the DAG files into an Airflow's folder; never overwrites other programs' files."""

import argparse
import hashlib
import os
import re
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
_HEADER_PREFIX = "# Written by `larder dags install`"

DagFileState = Literal["missing", "current", "older", "changed", "foreign"]
"""State of an installed file: `older` is of another release, `changed` by hand, `foreign` not Larder's."""


@dataclass(frozen=True, slots=True)
class DagFile:
    """DAG file of this release, and where Airflow has it."""

    source: Path
    target: Path

    def text(self) -> str:
        """Text of the target: a first line that says whose it is, with a digest of the rest, then the source."""
        source_text = self.source.read_text()
        return (
            f"{_HEADER_PREFIX} of Larder {THIS_RELEASE} ({_text_digest(source_text)}): changes are "
            f"overwritten.\n{source_text}"
        )

    def state(self) -> DagFileState:
        """State of the target now."""
        try:
            installed_text = self.target.read_text()
        except FileNotFoundError:
            return "missing"
        except (OSError, UnicodeDecodeError):
            return "foreign"
        header_line, _, installed_body = installed_text.partition("\n")
        if not header_line.startswith(_HEADER_PREFIX):
            return "foreign"
        if installed_text == self.text():
            return "current"
        return "older" if _text_digest(installed_body) in header_line else "changed"


def main(argv: Sequence[str], *, prog: str) -> int:
    """Exit code: 0 all files are of this release; raises ConfigError, nothing written, where one is in the way."""
    args = argument_parser(prog).parse_args(argv)
    installed_airflow = airflow_version()
    if installed_airflow is not None and (reason := airflow_refusal(installed_airflow)) is not None:
        raise ConfigError(reason)
    dag_files = list(list_dag_files(dags_folder(args.folder)))
    state_by_file = {dag_file: dag_file.state() for dag_file in dag_files}
    if not args.force:
        for file, state in state_by_file.items():
            if state in ("changed", "foreign"):
                reason = "was changed by hand" if state == "changed" else "was not written by this command"
                raise ConfigError(f"{file.target} {reason}: move it away, or overwrite it with --force")
    for file, state in state_by_file.items():
        if state != "current":
            _write_dag_file(file)
    if args.json:
        print(json_text({str(file.target): state for file, state in state_by_file.items()}))
        return 0
    for file, state in state_by_file.items():
        print(f"{file.target}: {'as it was' if state == 'current' else 'written'}")
    if installed_airflow is None:
        print(
            "Airflow is not installed in this environment, so its version was not looked at: the DAGs need Airflow 3.3."
        )
    print(f"Airflow's tasks need Larder in Airflow's own environment: {install_command('precompute')}.")
    print("They need LARDER_CONFIG with an absolute path, REDIS_URL, and a pool:")
    print('airflow pools set gpu 2 "scoring tasks". Each file tells how it is run.')
    return 0


def airflow_version() -> str | None:
    """Version of the Airflow in this environment, None without one; from metadata, since an import writes files."""
    for distribution_name in ("apache-airflow-core", "apache-airflow"):  # Airflow 2 is only the second
        try:
            return version(distribution_name)
        except PackageNotFoundError:
            continue
    return None


def airflow_refusal(installed_version: str) -> str | None:
    """Why the DAG files cannot work under a version of Airflow, with the remedy; None if they can."""
    version_numbers = tuple(int(number) for number in re.findall(r"\d+", installed_version)[:2])
    if AIRFLOW_VERSION_MIN <= version_numbers < AIRFLOW_VERSION_END:
        return None
    return (
        f"the DAGs need Airflow 3.3, and Airflow {installed_version} is installed here: upgrade Airflow, or "
        "have it run `larder night` from an environment of Larder's own"
    )


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(prog=prog, description="DAGs of nights, for Airflow.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    install_parser = commands.add_parser(
        "install",
        help="copy the DAG files into Airflow's folder",
        description=(
            f"Copy the DAG files into {LARDER_DAGS_SUBFOLDER}/ of Airflow's folder of DAGs. "
            "After an upgrade, once more: files of an older release are replaced, a file that was changed by "
            "hand or is somebody else's is refused."
        ),
    )
    install_parser.add_argument(
        "folder", nargs="?", metavar="FOLDER",
        help="Airflow's folder of DAGs (default: AIRFLOW__CORE__DAGS_FOLDER, else dags in AIRFLOW_HOME)",
    )  # fmt: skip
    install_parser.add_argument("--force", action="store_true", help="overwrite whatever is in the way")
    install_parser.add_argument("--json", action="store_true", help="each file with its state before")
    return parser


def dags_folder(named_folder: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Airflow's folder of DAGs; raises ConfigError where nothing says which it is, or it cannot be one."""
    if not (folder_path := named_folder or _configured_dags_folder(environ)):
        raise ConfigError(
            "where are Airflow's DAGs? Name the folder (larder dags install FOLDER; Airflow has ~/airflow/dags by "
            "itself), or set AIRFLOW__CORE__DAGS_FOLDER or AIRFLOW_HOME"
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


def _folder_setting_name(environ: Mapping[str, str]) -> str:
    return next(
        setting_name for setting_name in ("AIRFLOW__CORE__DAGS_FOLDER", "AIRFLOW_HOME") if environ.get(setting_name)
    )


def _configured_dags_folder(environ: Mapping[str, str]) -> str | None:
    if configured_folder := environ.get("AIRFLOW__CORE__DAGS_FOLDER"):
        return configured_folder
    airflow_home = environ.get("AIRFLOW_HOME")
    return str(Path(airflow_home) / "dags") if airflow_home else None


def list_dag_files(airflow_folder: Path) -> Iterator[DagFile]:
    """DAG files of this release as they are, or would be, in a folder of Airflow's."""
    for source_path in sorted(PACKAGED_DAGS_FOLDER.glob("*.py")):
        if source_path.stem != "__init__":
            yield DagFile(source_path, airflow_folder / LARDER_DAGS_SUBFOLDER / source_path.name)


def _write_dag_file(dag_file: DagFile) -> None:
    dag_file.target.parent.mkdir(parents=True, exist_ok=True)
    part_path = dag_file.target.with_suffix(".part")  # no .py: Airflow parses what it finds at any time
    part_path.write_text(dag_file.text())
    part_path.replace(dag_file.target)


def _text_digest(dag_text: str) -> str:
    return hashlib.sha256(dag_text.encode()).hexdigest()[:16]
