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

PACKAGED = Path(__file__).parents[2] / "dags"
FOLDER = "larder"
"""Folder for Larder's DAGs within Airflow's."""
AIRFLOW_OLDEST: Final = (3, 3)
"""First release of Airflow that has all that the DAG files import."""
AIRFLOW_NEXT_MAJOR: Final = (4,)
_HEADER_PREFIX = "# Written by `larder dags install`"

State = Literal["missing", "current", "older", "changed", "foreign"]
"""State of an installed file: `older` is of another release, `changed` by hand, `foreign` not Larder's."""


@dataclass(frozen=True, slots=True)
class DagFile:
    """DAG file of this release, and where Airflow has it."""

    source: Path
    target: Path

    def text(self) -> str:
        """Text of the target: a first line that says whose it is, with a digest of the rest, then the source."""
        body = self.source.read_text()
        return f"{_HEADER_PREFIX} of Larder {THIS_RELEASE} ({_digest(body)}): changes are overwritten.\n{body}"

    def state(self) -> State:
        """State of the target now."""
        try:
            installed_text = self.target.read_text()
        except FileNotFoundError:
            return "missing"
        except (OSError, UnicodeDecodeError):
            return "foreign"
        header_line, _, body = installed_text.partition("\n")
        if not header_line.startswith(_HEADER_PREFIX):
            return "foreign"
        if installed_text == self.text():
            return "current"
        return "older" if _digest(body) in header_line else "changed"


def main(argv: Sequence[str], *, prog: str) -> int:
    """Exit code: 0 all files are of this release; raises ConfigError, nothing written, where one is in the way."""
    args = argument_parser(prog).parse_args(argv)
    airflow = airflow_version()
    if airflow is not None and (reason := airflow_refusal(airflow)) is not None:
        raise ConfigError(reason)
    files = list(files_in(dags_folder(args.folder)))
    states = {dag_file: dag_file.state() for dag_file in files}
    if not args.force:
        for file, state in states.items():
            if state in ("changed", "foreign"):
                reason = (
                    "was changed by hand"
                    if state == "changed"
                    else "was not written by this command"
                )
                raise ConfigError(
                    f"{file.target} {reason}: move it away, or overwrite it with --force"
                )
    for file, state in states.items():
        if state != "current":
            _write(file)
    if args.json:
        print(json_text({str(file.target): state for file, state in states.items()}))
        return 0
    for file, state in states.items():
        print(f"{file.target}: {'as it was' if state == 'current' else 'written'}")
    if airflow is None:
        print(
            "Airflow is not installed in this environment, so its version was not looked at: the DAGs need Airflow 3.3."
        )
    print(
        f"Airflow's tasks need Larder in Airflow's own environment: {install_command('precompute')}."
    )
    print("They need LARDER_CONFIG with an absolute path, REDIS_URL, and a pool:")
    print('airflow pools set gpu 2 "scoring tasks". Each file tells how it is run.')
    return 0


def airflow_version() -> str | None:
    """Version of the Airflow in this environment, None without one; from metadata, since an import writes files."""
    for distribution in ("apache-airflow-core", "apache-airflow"):  # Airflow 2 is only the second
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def airflow_refusal(installed: str) -> str | None:
    """Why the DAG files cannot work under a version of Airflow, with the remedy; None if they can."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if AIRFLOW_OLDEST <= numbers < AIRFLOW_NEXT_MAJOR:
        return None
    return (
        f"the DAGs need Airflow 3.3, and Airflow {installed} is installed here: upgrade Airflow, or have it run "
        "`larder night` from an environment of Larder's own"
    )


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(prog=prog, description="DAGs of nights, for Airflow.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    install = commands.add_parser(
        "install",
        help="copy the DAG files into Airflow's folder",
        description=f"Copy the DAG files into {FOLDER}/ of Airflow's folder of DAGs. After an upgrade, once more: "
        "files of an older release are replaced, a file that was changed by hand or is somebody else's is refused.",
    )
    install.add_argument(
        "folder", nargs="?", metavar="FOLDER",
        help="Airflow's folder of DAGs (default: AIRFLOW__CORE__DAGS_FOLDER, else dags in AIRFLOW_HOME)",
    )  # fmt: skip
    install.add_argument("--force", action="store_true", help="overwrite whatever is in the way")
    install.add_argument("--json", action="store_true", help="each file with its state before")
    return parser


def dags_folder(named: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Airflow's folder of DAGs; raises ConfigError where nothing says which it is, or it cannot be one."""
    if not (folder_path := named or _of_airflow(environ)):
        raise ConfigError(
            "where are Airflow's DAGs? Name the folder (larder dags install FOLDER; Airflow has ~/airflow/dags by "
            "itself), or set AIRFLOW__CORE__DAGS_FOLDER or AIRFLOW_HOME"
        )
    folder = Path(folder_path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} cannot be Airflow's folder of DAGs: it is a file")
    if not folder.parent.is_dir():
        origin = "" if named else f", which {_setting_of(environ)} names"
        raise ConfigError(
            f"{folder}{origin}, cannot be Airflow's folder of DAGs: there is no folder {folder.parent}. Is that name "
            "right, and has Airflow been set up there (`airflow db migrate`)?"
        )
    return folder


def _setting_of(environ: Mapping[str, str]) -> str:
    return next(
        name for name in ("AIRFLOW__CORE__DAGS_FOLDER", "AIRFLOW_HOME") if environ.get(name)
    )


def _of_airflow(environ: Mapping[str, str]) -> str | None:
    if configured_folder := environ.get("AIRFLOW__CORE__DAGS_FOLDER"):
        return configured_folder
    home = environ.get("AIRFLOW_HOME")
    return str(Path(home) / "dags") if home else None


def files_in(folder: Path) -> Iterator[DagFile]:
    """DAG files of this release as they are, or would be, in a folder of Airflow's."""
    for source in sorted(PACKAGED.glob("*.py")):
        if source.stem != "__init__":
            yield DagFile(source, folder / FOLDER / source.name)


def _write(file: DagFile) -> None:
    file.target.parent.mkdir(parents=True, exist_ok=True)
    part_path = file.target.with_suffix(".part")  # no .py: Airflow parses what it finds at any time
    part_path.write_text(file.text())
    part_path.replace(file.target)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
