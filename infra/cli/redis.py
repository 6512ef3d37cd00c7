"""`larder redis`: runs a Redis-compatible server for trials on one machine, which the other commands find."""

import argparse
import os
import secrets
import signal
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from cache.errors import ConfigError
from cache.process.command_line import interrupts_never_swallowed
from infra.cli.commands import read_night_settings

POLL_INTERVAL_S = 1.0


def main(argv: Sequence[str], *, prog: str) -> int:
    """Run a server until interrupted; return 0; raise ConfigError if one already runs, is configured, or fails."""
    argument_parser(prog).parse_args(argv)
    from cache.process.redis_server import join_or_start_server, running_server  # imports redis-py: slow

    config = read_night_settings()
    if config.redis_url:
        raise ConfigError("a Redis is configured (redis_url or REDIS_URL) and used by all commands: none is started")
    state_folder = config.path(config.state)
    if (existing_server := running_server(state_folder)) is not None:
        raise ConfigError(
            f"a Redis already runs for {state_folder} at {url_without_password(existing_server.url)}: all commands "
            "use it"
        )
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.default_int_handler)
    try:
        with (
            interrupts_never_swallowed(),
            join_or_start_server(state_folder, password=secrets.token_urlsafe(24)) as running_redis,
        ):
            print(f"Redis runs at {url_without_password(running_redis.url)}", flush=True)
            print(
                f"Commands with the same settings use it (its password is in {state_folder / 'redis.json'}). It saves"
            )
            print(
                "nothing to disk: `larder restore` fills a new one from the store. After Ctrl-C it ends as soon as no "
                "other command uses it.",
                flush=True,
            )
            while _is_process_running(running_redis.pid):
                time.sleep(POLL_INTERVAL_S)
            raise ConfigError(f"the server ended unexpectedly; {state_folder / 'redis.log'} says why")
    except KeyboardInterrupt:
        return 0


def url_without_password(url: str) -> str:
    """Return host and port of a Redis URL, or the path of its socket, without user and password."""
    url_parts = urlsplit(url)
    return url_parts.netloc.rpartition("@")[2] or url_parts.path


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    return argparse.ArgumentParser(
        prog=prog,
        description="Run a Redis-compatible server on this machine until Ctrl-C: redis-server or valkey-server from "
        "PATH, else the one of the extra `local`. It binds to loopback, has a password and saves nothing to disk. "
        "If no Redis is configured and this command does not run, each command that needs a Redis starts one, which "
        "ends with the command. While this command runs, the pages of a night stay in memory for the service. For "
        "production, set REDIS_URL.",
    )


def _is_process_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
