"""`python -m serving`: checks its settings, finds or starts Redis, serves until it is told to stop."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import redis
import uvicorn
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from cache.embedded import redis_url
from cache.errors import ConfigError, LarderError
from cache.keys import Keyspace
from cache.releases import newest_release
from serving.app import check_token, create_app
from serving.config import ServingConfig

log = logging.getLogger("serving")

_BACKLOG = 2_048
_LOOK_S = 0.05
_QUIET_LOOKS = 5
_SWITCH_S = 0.0005
"""How long a thread that opens the next generation may keep the loop from going on; Python's own 5 ms is felt."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the service; 0 after a clean stop, 2 when it cannot start as configured."""
    sent = _parser().parse_args(arguments)
    # uvicorn raises what stopped it once more when it is done: the default would end us before Redis is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.setswitchinterval(_SWITCH_S)
    logging.basicConfig(level=sent.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        config = ServingConfig.load(
            os.environ, host=sent.host, port=sent.port, insecure=sent.insecure or None
        )
        config.require_guard()
        check_token(config.token)
        with _listening(config) as listener, redis_url(config.state, config.redis_url) as url:
            is_own = not config.redis_url
            config = config.with_redis(url)
            _check_redis(config, is_own=is_own)
            _serve(config, listener, sent.log_level)
    except LarderError as error:
        print(f"larder: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving",
        description="Serve predictions. Settings: the [serving] section of LARDER_CONFIG, then the "
        "environment (REDIS_URL, LARDER_ARTIFACTS, LARDER_NAMESPACE, LARDER_STATE, LARDER_TOKEN, "
        "LARDER_<SETTING>), then these options.",
    )
    parser.add_argument("--host", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to bind, 0 = any free one (default 8000)")
    parser.add_argument(
        "--insecure", action="store_true", help="let others reach the service without a token"
    )
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"]
    )
    return parser


def _listening(config: ServingConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    return listener


def _check_redis(config: ServingConfig, *, is_own: bool) -> None:
    """Refuses a Redis that may evict published pages; fills an empty one of our own from the artefact store."""
    try:
        client = redis.Redis.from_url(
            config.redis_url, protocol=2, socket_timeout=2.0, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise ConfigError(f"REDIS_URL cannot be used: {error}", field="redis_url") from error
    try:
        try:
            info: dict[str, object] = client.info("memory")
            policy = str(info.get("maxmemory_policy", ""))
        except ResponseError:
            policy = ""  # there, but this user may not ask; keeping up says so
        if policy.startswith("allkeys"):
            raise ConfigError(
                f"Redis has maxmemory-policy {policy}, which may evict published pages; set volatile-lru",
                field="redis_url",
            )
        is_empty = not client.exists(Keyspace(config.namespace).live)
    except redis.RedisError as error:
        log.warning("Redis does not answer (%s): starting from the newest release", error)
        return
    finally:
        client.close()
    if is_own and is_empty and newest_release(config.store()) is not None:
        _restore(config)


def _restore(config: ServingConfig) -> None:
    """Another program of ours, since serving never imports precompute."""
    log.info("Redis is empty: restoring the newest release")
    environment = os.environ | {
        "REDIS_URL": config.redis_url,
        "LARDER_ARTIFACTS": config.artifacts,
        "LARDER_NAMESPACE": config.namespace,
        "LARDER_STATE": str(config.state),
    }
    done = subprocess.run(
        [sys.executable, "-m", "precompute", "restore"],
        env=environment,
        stdout=sys.stderr,
        check=False,
    )
    if done.returncode:
        log.warning("restore ended with code %d: pages stay out of reach", done.returncode)


def _serve(config: ServingConfig, listener: socket.socket, log_level: str) -> None:
    server = _Server(
        uvicorn.Config(
            create_app(config),
            loop="uvloop",
            http="httptools",
            lifespan="on",
            access_log=False,
            log_level=log_level,
            backlog=_BACKLOG,
        ),
        drain_s=config.drain_s,
    )
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server.announcement = f"Larder serves on {url}"
    server.run(sockets=[listener])
    if not server.started:
        raise ConfigError("the service could not start; the log says why")


class _Server(uvicorn.Server):
    """Says where it serves once it does, on a line that a program can read, and stops when nobody asks any more."""

    announcement = ""

    def __init__(self, config: uvicorn.Config, *, drain_s: float) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._is_told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, then announces."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            # Modules and models stay for good; a full collection that walks them all held every request for 50 ms.
            gc.collect()
            gc.freeze()
            print(self.announcement, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drains at the first signal, exits at once at the second."""
        if self._loop is None or not self.started or self._is_told:
            super().handle_exit(sig, frame)
            self.force_exit = self._is_told
            if self.force_exit:
                self.config.timeout_graceful_shutdown = 0
            return
        self._is_told = True
        # A signal handler runs between any two instructions, and the loop may be asleep.
        self._loop.call_soon_threadsafe(self._start_draining, sig)

    def _start_draining(self, sig: int) -> None:
        self._draining = asyncio.create_task(self._drain(sig))

    async def _drain(self, sig: int) -> None:
        """Goes on accepting and answering until a while without requests: who was under way is not reset."""
        loop, state = asyncio.get_running_loop(), self.server_state
        give_up = loop.time() + self._drain_s
        app: Any = self.config.app
        signing_off = asyncio.create_task(app.state.service.drain())
        for headers in (self.config.encoded_headers, state.default_headers):
            headers.append((b"connection", b"close"))  # callers go elsewhere for their next request
        answered, quiet = state.total_requests, 0
        # Looks, not seconds: a loop that was busy in between has not yet seen what lies in its sockets.
        while quiet < _QUIET_LOOKS and loop.time() < give_up and not self.should_exit:
            await asyncio.sleep(_LOOK_S)
            is_quiet = not state.tasks and state.total_requests == answered
            answered, quiet = state.total_requests, quiet + 1 if is_quiet else 0
        await asyncio.wait({signing_off}, timeout=max(0.0, give_up - loop.time()))
        if not self.should_exit:
            self.config.timeout_graceful_shutdown = max(1, int(give_up - loop.time()))
            super().handle_exit(sig, None)


if __name__ == "__main__":
    sys.exit(main())
