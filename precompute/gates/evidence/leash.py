"""The connections of one gate, which end with its time."""

from typing import Any

import redis


class GateConnections:
    """All connections of one gate; once it is over there are none, however long its thread goes on."""

    def __init__(self) -> None:
        self.is_over = False
        self.pools: list[OwnPool] = []

    def end(self) -> None:
        """Close what is open and open nothing more."""
        self.is_over = True
        for pool in tuple(self.pools):
            pool.disconnect(inuse_connections=True)


class OwnPool(redis.ConnectionPool):
    """Connections of one gate to one server."""

    def __init__(self, leash: GateConnections, **settings: Any) -> None:
        self._leash = leash
        super().__init__(**settings)
        leash.pools.append(self)

    def get_connection(self, *arguments: Any, **named: Any) -> Any:
        """Raises ConnectionError once the gate's time is over."""
        self._demand_time(None)
        return super().get_connection(*arguments, **named)

    def make_connection(self) -> Any:
        """A connection that does not come back by itself once the gate's time is over."""
        connection = super().make_connection()
        connection.register_connect_callback(self._demand_time)  # type: ignore[no-untyped-call]
        return connection

    def _demand_time(self, connection: Any) -> None:
        if self._leash.is_over:
            if connection is not None:
                connection.disconnect()
            raise redis.exceptions.ConnectionError("the gate's time is over")
