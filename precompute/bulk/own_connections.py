"""Connections of bulk work's own, one to each server, for commands that are sent ahead of their replies."""

from typing import Any, Self

import redis


class OwnConnections:
    """Connections out of the client's pools, taken when first wanted, for as long as the `with` block lasts."""

    def __init__(self) -> None:
        self._taken: dict[Any, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for pool, connection in self._taken.items():
            if kind is not None:  # replies may still be on their way: it serves nothing more
                connection.disconnect()
            pool.release(connection)

    def to(self, server: "redis.Redis") -> Any:
        """The connection to a server, always the same."""
        pool = server.connection_pool
        if pool not in self._taken:
            self._taken[pool] = pool.get_connection()
        return self._taken[pool]
