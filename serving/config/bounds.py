"""What one peer may cost, whoever it is: bounds of heads, pipelines, connections and of how long each may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Of one server; defaults are those of the settings with the same names."""

    head_bytes: int = 32 << 10
    """Of a request's line and header fields, trailers included."""
    head_fields: int = 100
    head_timeout_s: float = 10.0
    """For a connection's first request to begin, and for each head to arrive whole."""
    body_timeout_s: float = 10.0
    """For the rest of a body whose request is answered already."""
    write_timeout_s: float = 10.0
    """For a peer to take the next 64 KiB of what it is sent."""
    idle_timeout_s: float = 5.0
    pipeline_max: int = 16
    """Requests of one connection that are not answered yet."""
    connections_max: int = 8_192
    connections_new_max: int = 4_096
    """Connections without a request so far."""
