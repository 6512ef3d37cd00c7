"""Redis for one command: the configured one, or one of our own filled with the data that the command needs."""

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
    """Yield settings with the configured Redis, or with one of our own for this command, filled with its data.

    A command that only notifies replicas joins a running server, and does without when there is none. One that fills
    the server of other commands is refused when there is none: what it filled would end with it.
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
    """Describe the state folder's Redis if it ended before the commands that use it, with the remedy; else None."""
    ended_server = recorded_server(state_folder)
    if ended_server is None or running_server(state_folder) is not None:
        return None
    return (
        f"the Redis that Larder ran here (127.0.0.1:{urlsplit(ended_server.url).port}) is gone, "
        f"{state_folder / 'redis.log'} may "
        "say why: a `larder serve` that runs starts and fills it again within seconds, or its log says why "
        "not; else start one"
    )


_NO_REDIS_TO_FILL_TEXT = (
    "no Redis is configured and none runs here, so there is none to rebuild: set REDIS_URL to the Redis of the "
    "service; without one, `larder serve` starts and fills its own"
)


def _fill_if_empty(config: NightConfig, progress: Progress) -> None:
    with open_releases(config) as releases:
        control = releases.control
        # What is no pointer is left to the command, which may be the one that removes it.
        is_empty = not control.client.exists(control.keyspace.live) and releases.ledger().live_generation is not None
    if is_empty:
        from precompute.releases.recovery import restore  # most servers are as they should be

        restore(config, attempt=new_attempt(), progress=progress)


def load_again(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """Loads the generation that a step is about again: the server that held its pages ended with its command."""
    from precompute.steps import load  # of the commands few prepare a server

    option_name = "to" if "to" in arguments else "generation"
    if (generation := getattr(arguments, option_name)) and _generation_state(config, generation) in _LOADABLE_STATES:
        load.run(config, {"generation": generation}, progress=progress)


def verify_again(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """Runs the gates again: the registry of the server that knew about an earlier `verify` is gone."""
    from precompute.steps import verify

    load_again(config, arguments, progress)
    # A refused or rolled-back one is lifted by `verify` alone, never on the way to a publish.
    if _generation_state(config, arguments.generation) in (GenerationState.LOADED, GenerationState.VERIFIED):
        verify.run(config, {"generation": arguments.generation}, attempt=new_attempt(), progress=progress)


def _generation_state(config: NightConfig, generation: str) -> GenerationState | None:
    with open_releases(config) as releases:
        return releases.state(generation)
