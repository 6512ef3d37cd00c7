"""Leases: which process computes a cold answer, told in Redis by one key per entity and input. Pure.

A lease is taken with `SET NX GET PX`, renewed and given back by compare-and-set, and marked done in the same pipeline
that stores the answer. Values are the leader's token, `DONE_PREFIX` and its token, or empty (given back).
"""

from typing import NamedTuple

DONE_PREFIX = b"done:"
"""Prefix of the value of a lease whose answer is stored."""

GIVEN_BACK = b""
"""Value of a lease whose leader got no answer, in its last millisecond."""

DONE_MS = 2_000
"""Milliseconds that a lease says "done": more than a process may take between missing an answer and asking to lead."""

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
    """Replace what was `expected_value`; answered with the new value, None when something else stands there."""

    key: str
    expected_value: bytes
    value: bytes
    life_ms: int


class LeaseMark(NamedTuple):
    """The lease to mark as done with the answer's own write."""

    key: str
    token: bytes


Lease = LeaseTake | LeaseSwap


_DONE_LIFE = b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(DONE_MS)), DONE_MS)
_TAKING, _UNLESS = b"*7\r\n$3\r\nSET\r\n", b"$2\r\nNX\r\n$3\r\nGET\r\n$2\r\nPX\r\n"
_SWAPPING = b"*7\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$1\r\n1\r\n" % (len(_SWAP), _SWAP)


def pack_lease(command: Lease) -> bytes:
    """RESP of one command: `SET NX GET PX` that takes a lease, or a script that swaps its value."""
    key, life = command.key.encode(), b"%d" % command.life_ms
    if isinstance(command, LeaseTake):
        token = command.token
        return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n%b$%d\r\n%b\r\n" % (
            _TAKING, len(key), key, len(token), token, _UNLESS, len(life), life,
        )  # fmt: skip
    expected_value, value = command.expected_value, command.value
    return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
        _SWAPPING, len(key), key, len(expected_value), expected_value, len(value), value, len(life), life,
    )  # fmt: skip


def pack_lease_mark(lease_mark: LeaseMark) -> bytes:
    """RESP that marks a lease as done, whoever leads by now: the answer is there."""
    key, value = lease_mark.key.encode(), DONE_PREFIX + lease_mark.token
    return b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (
        len(key), key, len(value), value, _DONE_LIFE,
    )  # fmt: skip
