"""Slots of a Redis Cluster: URLs that name one, and which node serves which slot. Pure."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from cache.errors import ConfigError
from cache.format.redis_keys import Keyspace

SLOTS: Final = REDIS_CLUSTER_HASH_SLOTS
SCHEMES: Final = ("redis+cluster://", "rediss+cluster://")
_PAGES_MAX = 1 << 16

Owners = dict[int, str]
"""Slot -> "host:port" of the master that serves it."""


def is_cluster(url: str) -> bool:
    """True if a URL says that its server is a node of a Redis Cluster."""
    return url.startswith(SCHEMES)


def seed_urls(url: str) -> list[str]:
    """A plain URL of each node that `redis+cluster://user:password@host:port,host:port` names.

    Raises ConfigError, which never repeats the URL: it may hold a password.
    """
    scheme, _, location = url.partition("+cluster://")
    parts = urlsplit(f"{scheme}://{location}")
    user, at, hosts = parts.netloc.rpartition("@")
    urls = []
    for host in hosts.split(","):
        node_parts = parts._replace(netloc=f"{user}{at}{host}")
        try:
            is_host = bool(node_parts.hostname) and node_parts.port != 0
        except ValueError:
            is_host = False
        if not is_host:
            raise ConfigError(
                f"{host!r} in the URL of a Redis Cluster is not host:port", field="redis_url"
            )
        urls.append(node_parts.geturl())
    if parts.path not in ("", "/", "/0"):
        raise ConfigError(
            f"a Redis Cluster has database 0 only, its URL ends in {parts.path!r}",
            field="redis_url",
        )
    return urls


def address_of(url: str) -> str:
    """ "host:port" of a plain URL."""
    parts = urlsplit(url)
    return join_address(parts.hostname or "", parts.port or 6379)


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_url(seed: str, address: str) -> str:
    """The URL of another node, with the credentials and options of a seed's."""
    parts = urlsplit(seed)
    user, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}{at}{address}").geturl()


def owners_of(reply: Sequence[Any], node_address: str) -> Owners:
    """The slot map in a reply to `CLUSTER SLOTS`; `node_address`, "host:port", answered it.

    A node that does not know its own address, or is told to keep it (`?`), is where it was asked.
    """
    node_host = node_address.rpartition(":")[0].strip("[]")
    owners: Owners = {}
    for first, last, (host, port, *_), *_replicas in reply:
        name = "" if host is None else host.decode() if isinstance(host, bytes) else str(host)
        address = join_address(node_host if name in ("", "?") else name, int(port))
        owners.update(dict.fromkeys(range(int(first), int(last) + 1), address))
    return owners


class PageSlots(dict[int, int]):
    """Page number -> slot, of one table of one generation."""

    def __init__(self, keys: Keyspace, generation: str, table: str) -> None:
        super().__init__()
        self._prefix = keys.page(generation, table, 0)[:-1].encode()

    def __missing__(self, page: int) -> int:
        if len(self) >= _PAGES_MAX:
            self.clear()
        slot = self[page] = key_slot(b"%b%d" % (self._prefix, page))
        return slot
