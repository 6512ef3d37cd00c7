"""A PostgreSQL of our own for Airflow's metadata: on a unix socket that only its owner reaches, gone afterwards."""

import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cache.errors import ConfigError
from cache.process.child_process import GuardedCommand

DEBIAN = Path("/usr/lib/postgresql")
OWNER = "postgres"
"""System user of the server where we are root, whom PostgreSQL refuses; Debian's package makes it."""
_PREFIX = "larder-postgres-"
_REMEDY = "on Debian `apt-get install postgresql`, on macOS `brew install postgresql`"
_START_S = 60.0
# Metadata of runs that end with this command: nothing of it has to survive a crash of the machine.
_SETTINGS = ("listen_addresses=", "fsync=off", "synchronous_commit=off", "full_page_writes=off")


def find_postgres(environ: Mapping[str, str] = os.environ, debian: Path = DEBIAN) -> Path:
    """The folder with `initdb` and `postgres`: that of PATH, else Debian's newest; ConfigError where there is none."""
    folders = [
        Path(path_entry) for path_entry in environ.get("PATH", "").split(os.pathsep) if path_entry
    ]
    versions = [
        bin_folder for bin_folder in debian.glob("*/bin") if bin_folder.parent.name.isdecimal()
    ]
    folders += sorted(versions, key=lambda bin_folder: int(bin_folder.parent.name), reverse=True)
    for folder in folders:
        if all((folder / name).is_file() for name in ("initdb", "postgres")):
            return folder
    raise ConfigError(
        f"no PostgreSQL server (initdb and postgres) on PATH or in {debian}/*/bin: {_REMEDY}"
    )


def owner(user_id: int, system_user: str = OWNER) -> pwd.struct_passwd:
    """Account that the server runs as: our own, or `system_user` where we are root; raises ConfigError without it."""
    if user_id != 0:
        return pwd.getpwuid(user_id)
    try:
        return pwd.getpwnam(system_user)
    except KeyError:
        raise ConfigError(
            f"PostgreSQL does not run as root and there is no system user {system_user!r}: "
            f"{_REMEDY}, or `useradd --system {system_user}`"
        ) from None


@contextmanager
def postgres(state: Path) -> Iterator[str]:
    """Yield the SQLAlchemy URL of an empty database that lasts as long as the block; its log is under `state`.

    Not for two at a time with one `state`. Raises ConfigError when it cannot be started.
    """
    programs, user = find_postgres(), owner(os.geteuid())
    link, log = state / "postgres", state / "postgres.log"
    _sweep(link)
    log.unlink(missing_ok=True)
    # Not under `state`: its owner may not be able to go there, and a socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    link.symlink_to(folder)
    try:
        as_owner = _as_owner(user)
        if as_owner:
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = folder / "data"
        initdb = [*as_owner, programs / "initdb", "-D", data, "-U", "airflow", "--auth=trust"]
        initdb += ["--encoding=UTF8", "--no-locale", "--no-sync"]
        with GuardedCommand(initdb, log=log, cwd=folder) as making:
            _wait(making, lambda: not making.running)
            if making.returncode != 0:
                raise ConfigError(f"initdb failed: {making.tail(5)}")
        server = [*as_owner, programs / "postgres", "-D", data, "-k", folder]
        for setting in _SETTINGS:
            server += ["-c", setting]
        with GuardedCommand(server, log=log, cwd=folder) as running:
            _wait(running, lambda: "ready to accept connections" in running.tail())
            yield f"postgresql+psycopg2://airflow@/postgres?host={folder}"
    finally:
        _sweep(link)


def _as_owner(user: pwd.struct_passwd) -> list[str | Path]:
    """Prefix of a command that `user` is to run; empty where that is us."""
    if user.pw_uid == os.geteuid():
        return []
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]


def _sweep(link: Path) -> None:
    """Remove the folder that `link` names, also one that a killed command left, and the link."""
    if not link.is_symlink():
        return
    folder = link.readlink()
    if folder.name.startswith(_PREFIX):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
    link.unlink()


def _wait(process: GuardedCommand, condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _START_S
    while not condition():
        if not process.running or time.monotonic() > give_up:
            raise ConfigError(
                f"{Path(process.command[0]).name} of PostgreSQL failed: {process.tail(5)}"
            )
        time.sleep(0.02)
