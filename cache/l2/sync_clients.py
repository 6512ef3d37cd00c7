"""Synchronous clients of one Redis server or of a cluster, and the connection for steps of the night."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisClusterException
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from cache.errors import ConfigError
from cache.l2.errors import translate_redis_errors
from cache.l2.resp import BOUNDED_POOL_SETTINGS, UNREADABLE_REPLY_ERRORS, check_replies
from cache.l2.sentinel import is_sentinel, primary_pool
from cache.l2.slots import SLOT_COUNT, address_of, is_cluster, join_address, seed_urls

CLUSTER_RETRIES = 2
"""Number of retries of a command after an error, each with a new slot map."""

PoolFactory = Callable[..., redis.ConnectionPool]


def open_client(url: str, **settings: Any) -> "redis.Redis":
    """Return a client of the server at `url`, of the primary that its sentinels name, or of its cluster.

    A cluster's client accepts commands on keys as `redis.Redis` does.

    Raises ConfigError or ValueError for an invalid URL, and redis-py's errors if no node of a cluster answers.
    """
    if is_sentinel(url):
        return check_replies(redis.Redis.from_pool(primary_pool(url, **settings, **BOUNDED_POOL_SETTINGS)))
    if not is_cluster(url):
        return check_replies(redis.Redis.from_url(url, **settings, **BOUNDED_POOL_SETTINGS))
    settings.pop("retry", None)
    return cast("redis.Redis", Cluster(url, settings))


@contextmanager
def connect(
    url: str | None, timeout_s: float, url_variable: str = "REDIS_URL", *, namespace: str = ""
) -> Iterator["redis.Redis"]:
    """Yield a synchronous client.

    Its errors become Larder's, with a remedy that names the variable or the namespace.
    """
    if not url:
        raise ConfigError(f"no Redis is configured: set {url_variable}, or run through a command that starts one")
    try:
        with translate_redis_errors(_without_password(url), url_variable):
            client = open_client(url, protocol=3, socket_timeout=timeout_s, socket_connect_timeout=min(timeout_s, 5.0))
    except ValueError as error:
        raise ConfigError(f"{url_variable} cannot be used: {error}") from error
    try:
        with translate_redis_errors(_without_password(url), url_variable, namespace):
            yield client
    finally:
        client.close()


def _without_password(url: str) -> str:
    """Return a URL without its password."""
    credentials, at_sign, host_and_port = urlsplit(url).netloc.rpartition("@")
    user = credentials.partition(":")[0]
    netloc = f"{user}@{host_and_port}" if at_sign and user else host_and_port
    return urlsplit(url)._replace(netloc=netloc, query="").geturl()


class Cluster(RedisCluster):
    """redis-py's client of a Redis Cluster, which `clone_client` can open again with its own connections.

    Full coverage is not required: with a node down, commands on the other nodes' keys still work.
    """

    def __init__(self, url: str, connection_settings: dict[str, Any]) -> None:
        seed, *node_urls = seed_urls(url)
        self.url_and_settings = url, connection_settings
        try:
            super().__init__(
                url=seed,
                startup_nodes=[_startup_node(node_url) for node_url in node_urls],
                require_full_coverage=False,
                retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), CLUSTER_RETRIES),
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
                # redis-py does not pass the parser's settings on to the connections to nodes.
                connection_pool_class=partial(redis.ConnectionPool, **BOUNDED_POOL_SETTINGS),
                **connection_settings,
            )
        except UNREADABLE_REPLY_ERRORS as error:  # redis-py reads the first map before `check_replies` can apply
            raise RedisClusterException(
                f"CLUSTER SLOTS was not answered by a slot map ({type(error).__name__}: {error})"
            ) from error
        self._check_nodes()

    def _check_nodes(self) -> None:
        """Check the replies of the clients of all nodes, including nodes that are discovered later."""
        nodes_manager = self.nodes_manager
        create_redis_node = nodes_manager.create_redis_node

        def create_checked(*arguments: Any, **named: Any) -> "redis.Redis":
            client: redis.Redis = create_redis_node(*arguments, **named)  # type: ignore[no-untyped-call]
            return check_replies(client)

        nodes_manager.create_redis_node = create_checked  # type: ignore[method-assign]
        for node in {*nodes_manager.nodes_cache.values(), *nodes_manager.startup_nodes.values()}:
            if node.redis_connection is not None:
                check_replies(node.redis_connection)

    def close(self) -> None:
        """Close every connection to every node; redis-py's own `close` leaves them to the garbage collector."""
        for node in self.nodes_manager.nodes_cache.values():
            if node.redis_connection is not None:
                disconnect(node.redis_connection)


def _startup_node(url: str) -> ClusterNode:
    host, _, port = address_of(url).rpartition(":")
    return ClusterNode(host.strip("[]"), int(port))  # type: ignore[no-untyped-call]


def disconnect(client: "redis.Redis") -> None:
    """Close every connection of a client, even if its pool was passed to it."""
    if isinstance(client, Cluster):
        client.close()
    else:
        client.connection_pool.disconnect()


def clone_client(
    client: "redis.Redis", create_pool: PoolFactory = redis.ConnectionPool, **changed_settings: Any
) -> Any:
    """Return a client of the same server or cluster with its own connections and other settings."""
    if not isinstance(client, Cluster):
        client_pool = client.connection_pool
        settings = {**client_pool.connection_kwargs, **BOUNDED_POOL_SETTINGS, **changed_settings}
        own_pool = create_pool(connection_class=client_pool.connection_class, **settings)
        return check_replies(redis.Redis(connection_pool=own_pool))
    changed_settings.pop("retry", None)
    url, settings = client.url_and_settings
    cluster = Cluster(url, {**settings, **changed_settings})
    nodes_manager = cluster.nodes_manager
    nodes_manager.connection_pool_class = partial(create_pool, **BOUNDED_POOL_SETTINGS)
    for node in nodes_manager.nodes_cache.values():
        if node.redis_connection is not None:
            disconnect(node.redis_connection)
            node.redis_connection = None
    return cluster


def primary_clients(client: "redis.Redis") -> dict[str, "redis.Redis"]:
    """Return a plain client of each server that accepts writes by name: "primary", in a cluster "primary host:port"."""
    if not isinstance(client, Cluster):
        return {"primary": client}
    return {
        f"primary {join_address(node.host, node.port)}": client.get_redis_connection(node)
        for node in sorted(client.get_primaries(), key=lambda node: (node.host, node.port))
    }


def client_for_key(client: "redis.Redis", key: str) -> "redis.Redis":
    """Return a plain client of the server that holds `key`."""
    if not isinstance(client, Cluster):
        return client
    return client.get_redis_connection(client.get_node_from_key(key))


def group_keys_by_server(
    client: "redis.Redis", keys: Sequence[str] | Sequence[bytes]
) -> Iterable[tuple["redis.Redis", Sequence[int]]]:
    """Return a plain client of each server that holds some of these keys, with the indexes of its keys in `keys`."""
    if not isinstance(client, Cluster):
        return [(client, range(len(keys)))]
    group_by_node: dict[str, tuple[redis.Redis, list[int]]] = {}
    for index, key in enumerate(keys):
        node = client.get_node_from_key(key)
        client_and_indexes = group_by_node.get(node.name)
        if client_and_indexes is None:
            client_and_indexes = group_by_node[node.name] = (client.get_redis_connection(node), [])
        client_and_indexes[1].append(index)
    return group_by_node.values()


def compute_keyspace_shares(client: "redis.Redis") -> dict[str, float]:
    """Return each server's share of the keyspace, 0 to 1, by the names of `primary_clients`."""
    if not isinstance(client, Cluster):
        return {"primary": 1.0}
    nodes_by_slot = client.nodes_manager.slots_cache
    fraction_by_server = dict.fromkeys(primary_clients(client), 0.0)
    for slot_nodes in nodes_by_slot.values():
        server_name = f"primary {join_address(slot_nodes[0].host, slot_nodes[0].port)}"
        fraction_by_server[server_name] = fraction_by_server.get(server_name, 0.0) + 1 / SLOT_COUNT
    return fraction_by_server


class BulkConnections:
    """Connections from the client's pools, taken at first use and returned at the end of the `with` block.

    One per server, for bulk commands that are sent before earlier replies have arrived.
    """

    def __init__(self) -> None:
        self._connection_by_pool: dict[Any, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_class: object, *_: object) -> None:
        for pool, connection in self._connection_by_pool.items():
            if error_class is not None:  # replies may still be pending: the connection must not be used again
                connection.disconnect()
            pool.release(connection)

    def connection_to(self, server: "redis.Redis") -> Any:
        """Return the connection to a server, always the same one."""
        pool = server.connection_pool
        if pool not in self._connection_by_pool:
            self._connection_by_pool[pool] = pool.get_connection()
        return self._connection_by_pool[pool]
