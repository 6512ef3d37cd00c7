"""Leases: which process computes a cold answer, told in Redis by one key per entity and input. Pure.

A lease is taken with `SET NX GET PX`, renewed and given back by compare-and-set, and marked done in the same pipeline
that stores the answer. Values are the leader's token, `DONE` and its token, or empty (given back).
"""

from typing import NamedTuple

DONE = b"done:"
"""Begins the value of a lease whose answer is stored."""

GIVEN_BACK = b""
"""A lease whose leader got no answer, in its last millisecond."""

DONE_MS = 2_000
"""How long a lease says "done": longer than a process may take between missing an answer and asking to lead."""

# Any value is only ever replaced by who has seen it. Removing would need a right (DEL) that would reach overlays too.
_SWAP = b"""if redis.call('GET', KEYS[1]) == ARGV[1] then
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
end"""


class LeaseTake(NamedTuple):
    """Lead for `life_ms` unless somebody does; answered with None when it was taken, else with what stands there."""

    key: str
    token: bytes
    life_ms: int


class LeaseSwap(NamedTuple):
    """Replace what was `seen`; answered with the new value, None when something else stands there."""

    key: str
    seen: bytes
    value: bytes
    life_ms: int


class Mark(NamedTuple):
    """The lease to mark as done with the answer's own write."""

    key: str
    token: bytes


Lease = LeaseTake | LeaseSwap


def pack_lease(command: Lease) -> bytes:
    """RESP of one command."""
    if type(command) is LeaseTake:
        key, token, life_ms = command
        return _packed(b"SET", key.encode(), token, b"NX", b"GET", b"PX", b"%d" % life_ms)
    swap: LeaseSwap = command  # type: ignore[assignment]
    life = b"%d" % swap.life_ms
    return _packed(b"EVAL", _SWAP, b"1", swap.key.encode(), swap.seen, swap.value, life)


def pack_mark(mark: Mark) -> bytes:
    """RESP that marks a lease as done, whoever leads by now: the answer is there."""
    return _packed(b"SET", mark.key.encode(), DONE + mark.token, b"PX", b"%d" % DONE_MS)


def _packed(*parts: bytes) -> bytes:
    sized = b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])
    return b"*%d\r\n%b" % (len(parts), sized)
