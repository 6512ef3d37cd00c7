"""Connections of bulk work's own, one to each server, for commands that are sent ahead of their replies."""

from typing import Any, Self

import redis


class OwnConnections:
    """Connections out of the client's pools, taken when first wanted, for as long as the `with` block lasts."""

    def __init__(self) -> None:
        self._connection_by_pool: dict[Any, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for pool, connection in self._connection_by_pool.items():
            if kind is not None:  # replies may still be on their way: it serves nothing more
                connection.disconnect()
            pool.release(connection)

    def to(self, server: "redis.Redis") -> Any:
        """The connection to a server, always the same."""
        pool = server.connection_pool
        if pool not in self._connection_by_pool:
            self._connection_by_pool[pool] = pool.get_connection()
        return self._connection_by_pool[pool]
