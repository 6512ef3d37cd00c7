"""`python -m serving`: checks the settings, finds or starts Redis, and serves until it is stopped."""

import argparse
import asyncio
import functools
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AskError, RedisClusterException, ResponseError
from redis.retry import Retry

from cache.errors import ConfigError, LarderError
from cache.format.redis_keys import Keyspace
from cache.l2.errors import describe_connection_error
from cache.l2.resp import WrongReply
from cache.l2.sync_clients import open_client, primary_clients
from cache.process.command_line import SERVING_MODULES, interrupts_never_swallowed, missing_extra, printable_lines
from cache.process.redis_server import running_server, supervised_redis_url
from cache.store.releases import newest_release
from serving.access.quota import QuotaTable
from serving.process.log_setup import configure_for
from serving.process.supervisor import QUOTAS_FILE_NAME, WorkerSpawner, WorkerSupervisor

if TYPE_CHECKING:
    from serving.config.settings import ServingConfig

log = logging.getLogger("serving")

_LISTEN_BACKLOG = 2_048
_SEND_BUFFER_BYTES = 256 << 10
"""Size of a connection's send buffer in bytes: allows 2.5 MB/s at a round trip of 100 ms."""
_MODULE_BY_COMMAND = {
    "explain": "serving.explain.cli",
    "lookup": "serving.cli.lookup",
    "tokens": "serving.cli.tokens",
    "top": "serving.dashboard.terminal",
}
"""Module by subcommand: its `main` gets the remaining arguments. Without a subcommand the service starts."""

PROG = "python -m serving"


def main(arguments: Sequence[str] | None = None, *, prog: str = PROG) -> int:
    """Run the service; return 0 after a clean stop, 2 if it cannot start as configured, 1 if no worker stays up."""
    argv = sys.argv[1:] if arguments is None else list(arguments)
    if argv and argv[0] in _MODULE_BY_COMMAND:
        run_command: Callable[[Sequence[str]], int] = importlib.import_module(_MODULE_BY_COMMAND[argv[0]]).main
        return run_command(argv[1:])
    options = argument_parser(prog).parse_args(argv)
    if missing_extra_message := missing_extra(prog, "serving", *SERVING_MODULES):
        print(f"larder: {missing_extra_message}", file=sys.stderr)
        return 2
    from cache.config.variables import demand_spelled_variables, unknown_variables
    from serving.config.settings import ServingConfig  # loads pydantic, which --help does not need
    from serving.process.start_check import check_startable

    # When uvicorn has shut down, it raises the signal again: the default handler would end the process before Redis is
    # stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        demand_spelled_variables(os.environ)
        config = ServingConfig.load(
            os.environ, host=options.host, port=options.port, workers=options.workers, insecure=options.insecure or None
        )
        configure_for(config, options.log_level)
        for name in unknown_variables(os.environ):
            log.warning("%s is set, but Larder has no such variable", name)
        check_startable(config)
        if not config.redis_url and running_server(Path(config.state)) is not None:
            log.info("uses the Redis that another command started here; the last command that uses it stops it")
        with (
            interrupts_never_swallowed(),
            _open_listener(config) as listener,
            supervised_redis_url(
                Path(config.state), config.redis_url, refill_server=functools.partial(_refill_own_redis, config)
            ) as redis_url,
        ):
            is_own_redis = not config.redis_url
            config = replace(config, redis_url=redis_url)
            configure_for(config, options.log_level)
            _check_redis(config, is_own_redis=is_own_redis)
            serve = _serve if config.workers == 1 else _supervise
            return serve(config, listener, options.log_level)
    except LarderError as error:
        print(printable_lines(f"larder: {error.message}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve predictions; or `top`: show the dashboard of a service. "
        "Settings: the [serving] section of LARDER_CONFIG, then the "
        "environment (REDIS_URL, LARDER_ARTIFACTS, LARDER_NAMESPACE, LARDER_STATE, LARDER_TOKEN, "
        "LARDER_<SETTING>), then these options. `larder explain --help`: "
        "why an entity is answered as it is; `lookup --help`: its answer; `tokens --help`: tokens with scopes, quotas "
        "and expiry.",
    )
    parser.add_argument("--host", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to bind, 0 = any free one (default 8000)")
    parser.add_argument("--workers", type=int, help="worker processes, each with its own L1 (default 1)")
    parser.add_argument("--insecure", action="store_true", help="let others reach the service without a token")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def _open_listener(config: "ServingConfig") -> socket.socket:
    try:
        address_family, socket_type, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(address_family, socket_type, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. With the kernel's automatic sizing a peer that reads nothing could occupy 4 MiB.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(_LISTEN_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    return listener


def _check_redis(config: "ServingConfig", *, is_own_redis: bool) -> bool:
    """Raise ConfigError for a Redis that may evict published pages; fill the service's own Redis if it is empty.

    It is filled from the artefact store. Returns False if Redis could not be reached or filled.
    """
    try:
        client = open_client(config.redis_url, protocol=2, socket_timeout=2.0, retry=Retry(NoBackoff(), 0))
    except ValueError as error:
        raise ConfigError(f"REDIS_URL cannot be used: {error}", field="redis_url") from error
    except (redis.RedisError, RedisClusterException) as error:
        log.warning("no node of the Redis Cluster answers (%s): starting from the newest release", error)
        return False
    try:
        policies = [_eviction_policy(server) for server in primary_clients(client).values()]
        if evicting_policy := next(
            (eviction_policy for eviction_policy in policies if eviction_policy.startswith("allkeys")), None
        ):
            raise ConfigError(
                f"Redis has maxmemory-policy {evicting_policy}, which may evict published pages; set volatile-lru",
                field="redis_url",
            )
        is_empty = not client.exists(Keyspace(config.namespace).live)
    except AskError as error:
        raise ConfigError(
            "REDIS_URL names a node of a Redis Cluster: write redis+cluster:// (with TLS rediss+cluster://)",
            field="redis_url",
        ) from error
    except redis.AuthenticationError as error:
        log.error(
            "Redis refuses user and password (%s), correct them in REDIS_URL: starting from the newest release", error
        )
        return False
    except (redis.RedisError, RedisClusterException) as error:
        log.warning("Redis does not answer (%s): starting from the newest release", describe_connection_error(error))
        return False
    finally:
        client.close()
    if is_own_redis and is_empty:
        if newest_release(config.store()) is not None:
            return _restore_newest_release(config)
        settings_file = os.environ.get("LARDER_CONFIG") or "defaults, no larder.toml in this folder"
        log.warning(
            "nothing was published in %s yet (settings: %s): run `larder night`, or start in your settings' folder",
            config.artifacts, settings_file,
        )  # fmt: skip
    return True


def _refill_own_redis(config: "ServingConfig", redis_url: str) -> bool:
    """Fill the service's own Redis after its restart; log an error instead of raising it, since the service goes on."""
    try:
        return _check_redis(replace(config, redis_url=redis_url), is_own_redis=True)
    except (LarderError, OSError) as error:
        log.error("the restarted Redis was not filled: %s", error)
        return False


def _eviction_policy(server: "redis.Redis") -> str:
    try:
        memory_info: dict[str, object] = server.info("memory")
        return str(memory_info.get("maxmemory_policy", ""))
    except WrongReply:
        raise
    except ResponseError:
        return ""  # this Redis user has no permission for INFO; the policy is unknown


def _restore_newest_release(config: "ServingConfig") -> bool:
    """Restore the newest release by running Larder's restore program, since serving never imports precompute."""
    log.info("the Redis that was just started is empty: filling it with the newest release")
    environment = os.environ | {
        "REDIS_URL": config.redis_url,
        "LARDER_ARTIFACTS": config.artifacts,
        "LARDER_NAMESPACE": config.namespace,
        "LARDER_STATE": config.state,
    }
    completed = subprocess.run(
        [sys.executable, "-m", "precompute", "restore"], env=environment, stdout=sys.stderr, check=False
    )
    if completed.returncode:
        log.warning("restore ended with code %d: Redis lacks the pages of the newest release", completed.returncode)
    return completed.returncode == 0


def _announce(listener: socket.socket, scheme: str) -> None:
    """Print the line with the service's address, which programs parse."""
    host, port = listener.getsockname()[:2]
    host_text = f"[{host}]" if ":" in host else host
    print(f"Larder serves on {scheme}://{host_text}:{port}", flush=True)


def _serve(config: "ServingConfig", listener: socket.socket, log_level: str) -> int:
    # Imported here: the parent process of workers needs neither the web framework nor the model runtime.
    from serving.app import create_app, make_server

    announce = functools.partial(_announce, listener, config.url_scheme)
    server = make_server(create_app(config), config, log_level, announce)
    server.run(sockets=[listener])
    if not server.started:
        raise ConfigError("the service could not start; the log says why")
    return 0


def _supervise(config: "ServingConfig", listener: socket.socket, log_level: str) -> int:
    announce = functools.partial(_announce, listener, config.url_scheme)
    with tempfile.TemporaryDirectory(prefix="larder-") as workers_folder:  # mode 0700: other users have no access
        if config.tokens_file:  # during a rolling restart old and new workers run together
            QuotaTable.create(Path(workers_folder) / QUOTAS_FILE_NAME, 2 * config.workers + 8)
        spawner = WorkerSpawner(listener, Path(workers_folder), config.redis_url, log_level)
        return asyncio.run(WorkerSupervisor(config.workers, spawner, config.drain_s, announce).run())


if __name__ == "__main__":
    sys.exit(main())
