"""Bounds on what one peer may cost: heads, bodies, pipelines, connections, and how long each may take."""

from pydantic import PositiveFloat, PositiveInt

from cache.config.section import section


@section
class Bounds:
    """Bounds of one server, in `[serving]`."""

    head_bytes: PositiveInt = 32 << 10
    """Bytes of a request's target and header fields, trailers included; more is refused with 431, and the connection is
    closed."""
    head_fields: PositiveInt = 100
    """Number of header fields of a request; more is refused like too many bytes."""
    head_timeout_s: PositiveFloat = 10.0
    """Seconds that a connection may wait before its first request begins, and each head may take to arrive; then the
    connection is closed, with 408 if a head had begun. This and the two other times of connections are kept to within a
    second."""
    body_timeout_s: PositiveFloat = 10.0
    """Seconds that a request body may take to arrive whole; then 408 `body_timeout`, and the connection is closed.
    The rest of a body that is not read because its request is answered has as long."""
    write_timeout_s: PositiveFloat = 10.0
    """Seconds in which a peer must take 64 KiB of its answers; a slower one is cut off."""
    answers_bytes: PositiveInt = 64 << 20
    """Bytes of answers to all requests of a worker together that peers have not taken yet, where one connection has
    64 KiB or more of them; beyond it connections whose peers have let theirs wait for a second are cut off, and while
    that is not enough batches are refused with 503 `overloaded`."""
    idle_timeout_s: PositiveFloat = 5.0
    """Seconds that a connection is kept after its last answer."""
    pipeline_max: PositiveInt = 16
    """Number of requests of one connection that are not answered yet, of which 64 KiB of bodies may wait; beyond
    that one more answer is sent and the connection closed."""
    connections_max: PositiveInt = 8_192
    """Number of connections of a worker, where as many files may be open (the soft limit is raised as far as the
    hard one allows, 256 are left for everything else); one more is closed with 503."""
    connections_new_max: PositiveInt = 4_096
    """Number of these that have not sent the head of a request so far; for one more the oldest of them is closed."""
