"""Redis for one command: the configured one, or a temporary server filled with the data that the command needs."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from cache.control.states import STATES_BY_ACTION, GenerationState
from cache.errors import ConfigError
from cache.process.redis_server import join_running_server, recorded_server, redis_url, running_server
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.releases.moves import new_attempt
from precompute.releases.release_log import open_releases

_LOADABLE_STATES = (*STATES_BY_ACTION["load"], GenerationState.SUPERSEDED, None)


@contextmanager
def open_redis_for_command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> Iterator[NightConfig]:
    """Yield settings with the configured Redis, or with a temporary server for this command, filled with its data.

    A command that only notifies replicas joins a running server, and runs without Redis if there is none. A command
    that fills the server of other commands is refused if there is none: its data would be lost at its end.
    """
    state_folder, redis_need = config.path(config.state), arguments.redis
    if config.redis_url or redis_need == "none":
        yield config
    elif redis_need == "if running":
        with join_running_server(state_folder) as joined:
            yield replace(config, redis_url=joined.url if joined else None)
    elif redis_need == "running":
        with join_running_server(state_folder) as joined:
            if joined is None:
                raise ConfigError(describe_ended_redis(state_folder) or _NO_REDIS_TO_FILL_TEXT)
            yield replace(config, redis_url=joined.url)
    else:
        is_new = running_server(state_folder) is None
        with redis_url(state_folder, None) as server_url:
            ready_config = replace(config, redis_url=server_url)
            _fill_if_empty(ready_config, progress)
            if is_new:
                arguments.prepare(ready_config, arguments, progress)
            yield ready_config


def describe_ended_redis(state_folder: Path) -> str | None:
    """Return a text, with the remedy, if the state folder's Redis ended before the commands that use it; else None."""
    ended_server = recorded_server(state_folder)
    if ended_server is None or running_server(state_folder) is not None:
        return None
    return (
        f"the Redis that Larder ran here (127.0.0.1:{urlsplit(ended_server.url).port}) has ended, see "
        f"{state_folder / 'redis.log'}: a running `larder serve` starts and fills it again within seconds, or its log "
        "says why not; else start one"
    )


_NO_REDIS_TO_FILL_TEXT = (
    "no Redis is configured and none runs here, so there is none to rebuild: set REDIS_URL to the Redis of the "
    "service; without one, `larder serve` starts and fills its own"
)


def _fill_if_empty(config: NightConfig, progress: Progress) -> None:
    with open_releases(config) as releases:
        control = releases.control
        # An invalid pointer is left to the command, which may be the one that removes it.
        is_empty = not control.client.exists(control.keyspace.live) and releases.ledger().live_generation is not None
    if is_empty:
        from precompute.releases.recovery import restore  # imported only if needed: most servers are filled

        restore(config, attempt=new_attempt(), progress=progress)


def load_again(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """Load the command's generation again: the server that held its pages ended with an earlier command."""
    from precompute.steps import load  # imported only if needed: few commands prepare a server

    option_name = "to" if "to" in arguments else "generation"
    if (generation := getattr(arguments, option_name)) and _generation_state(config, generation) in _LOADABLE_STATES:
        load.run(config, {"generation": generation}, progress=progress)


def verify_again(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """Run the gates again: the registry with the result of an earlier `verify` was lost with its server."""
    from precompute.steps import verify

    load_again(config, arguments, progress)
    # Only the command `verify` may lift a refusal or a roll back, never a publish.
    if _generation_state(config, arguments.generation) in (GenerationState.LOADED, GenerationState.VERIFIED):
        verify.run(config, {"generation": arguments.generation}, attempt=new_attempt(), progress=progress)


def _generation_state(config: NightConfig, generation: str) -> GenerationState | None:
    with open_releases(config) as releases:
        return releases.state(generation)
