"""Several service processes over one night, as replicas behind a balancer would be."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from cache.control.control_keys import Control, Replica
from infra.local.service import ServiceProcess
from precompute.config.settings import NightConfig
from tests.integration.nights import PATIENT_ENVIRON, environment
from tests.polling import poll_until


@contextmanager
def fleet(config: NightConfig, folder: Path, *, count: int = 3, **more: str) -> Iterator[list[ServiceProcess]]:
    """Start several services and wait for their heartbeats."""
    folder.mkdir(parents=True, exist_ok=True)
    services = [
        ServiceProcess(folder / f"service-{number}.log", environment(config, **PATIENT_ENVIRON | more))
        for number in range(count)
    ]
    with ExitStack() as stack:
        with ThreadPoolExecutor(count) as pool:
            for started in [pool.submit(service.__enter__) for service in services]:
                started.result()
        for service in services:
            stack.push(service)
        with control_of(config) as control:
            assert poll_until(lambda: len(control.replicas()) >= count)
        yield services


@contextmanager
def control_of(config: NightConfig) -> Iterator[Control]:
    """Open the control keys with a client of the test's own."""
    assert config.redis_url is not None
    with redis.Redis.from_url(config.redis_url, protocol=3) as client:
        yield Control(client, config.keyspace())


def beating(config: NightConfig) -> list[Replica]:
    """Return the last heartbeats of the running replicas."""
    with control_of(config) as control:
        return control.replicas()
