"""The registry of releases, as a step opens it."""

from collections.abc import Iterator
from contextlib import contextmanager

from precompute.config.settings import NightConfig
from precompute.control.control_keys import Control, connect
from precompute.releases.release import Releases


@contextmanager
def open_releases(config: NightConfig) -> Iterator[Releases]:
    """Opens the release history for the length of a step, over a connection of its own."""
    with connect(config.redis_url, config.redis_timeout_s) as client:
        yield Releases(config.store(), Control(client, config.keyspace()))
