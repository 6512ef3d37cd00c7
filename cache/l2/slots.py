"""Slots of a Redis Cluster: URLs of a cluster, and the owners of its slots. Pure."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from cache.errors import ConfigError
from cache.format.redis_keys import Keyspace

SLOT_COUNT: Final = REDIS_CLUSTER_HASH_SLOTS
CLUSTER_URL_SCHEMES: Final = ("redis+cluster://", "rediss+cluster://")
_CACHED_PAGES_MAX = 1 << 16

SlotOwners = dict[int, str]
"""Slot -> "host:port" of the master that serves it."""


def is_cluster(url: str) -> bool:
    """Return whether a URL says that its server is a node of a Redis Cluster."""
    return url.startswith(CLUSTER_URL_SCHEMES)


def seed_urls(url: str) -> list[str]:
    """Return a plain URL of each node in `redis+cluster://user:password@host:port,host:port`.

    Raises ConfigError, whose message never contains the URL, as that may contain a password.
    """
    scheme, _, location = url.partition("+cluster://")
    url_parts = urlsplit(f"{scheme}://{location}")
    user, at_sign, host_list = url_parts.netloc.rpartition("@")
    node_urls = []
    for host in host_list.split(","):
        node_parts = url_parts._replace(netloc=f"{user}{at_sign}{host}")
        try:
            is_host_and_port = bool(node_parts.hostname) and node_parts.port != 0
        except ValueError:
            is_host_and_port = False
        if not is_host_and_port:
            raise ConfigError(f"{host!r} in the URL of a Redis Cluster is not host:port", field="redis_url")
        node_urls.append(node_parts.geturl())
    if url_parts.path not in ("", "/", "/0"):
        raise ConfigError(
            f"a Redis Cluster has database 0 only, but its URL ends with {url_parts.path!r}", field="redis_url"
        )
    return node_urls


def address_of(url: str) -> str:
    """Return "host:port" of a plain URL."""
    url_parts = urlsplit(url)
    return join_address(url_parts.hostname or "", url_parts.port or 6379)


def join_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_url(seed_url: str, address: str) -> str:
    """Return the URL of another node, with the credentials and options of a seed's URL."""
    url_parts = urlsplit(seed_url)
    user, at_sign, _ = url_parts.netloc.rpartition("@")
    return url_parts._replace(netloc=f"{user}{at_sign}{address}").geturl()


def owners_from_reply(cluster_slots_reply: Sequence[Any], node_address: str) -> SlotOwners:
    """Parse the slot map in a reply to `CLUSTER SLOTS`, which the node at `node_address` ("host:port") sent.

    A node without a known address (empty or `?`) is taken to be at `node_address`.
    """
    node_host = node_address.rpartition(":")[0].strip("[]")
    owners: SlotOwners = {}
    for first_slot, last_slot, (host, port, *_), *_replicas in cluster_slots_reply:
        host_name = "" if host is None else host.decode() if isinstance(host, bytes) else str(host)
        address = join_address(node_host if host_name in ("", "?") else host_name, int(port))
        owners.update(dict.fromkeys(range(int(first_slot), int(last_slot) + 1), address))
    return owners


class PageSlots(dict[int, int]):
    """Page number -> slot, for one table of one generation."""

    def __init__(self, keyspace: Keyspace, generation: str, table: str) -> None:
        super().__init__()
        self._page_key_prefix = keyspace.page(generation, table, 0)[:-1].encode()

    def __missing__(self, page_number: int) -> int:
        if len(self) >= _CACHED_PAGES_MAX:
            self.clear()
        slot = self[page_number] = key_slot(b"%b%d" % (self._page_key_prefix, page_number))
        return slot
