"""Bounds on what one peer may cost: heads, pipelines, connections and how long each may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Bounds of one server; defaults are those of the settings with the same names."""

    head_bytes: int = 32 << 10
    """Bytes of a request's line and header fields, trailers included."""
    head_fields: int = 100
    head_timeout_s: float = 10.0
    """Seconds for a connection's first request to begin, and for each head to arrive whole."""
    body_timeout_s: float = 10.0
    """Seconds for the rest of a body whose request is answered already."""
    write_timeout_s: float = 10.0
    """Seconds for a peer to take the next 64 KiB of what it is sent."""
    idle_timeout_s: float = 5.0
    pipeline_max: int = 16
    """Number of requests of one connection that are not answered yet."""
    connections_max: int = 8_192
    connections_new_max: int = 4_096
    """Number of connections without a request so far."""
