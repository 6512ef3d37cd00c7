"""Redirections: what a node of Redis Cluster answers when a key is not its own, or not any more. Pure."""

import re
from typing import Any

from cache.errors import TierUnavailable
from cache.l2.slots import SLOTS, join_address

# An IPv6 address comes without brackets; a host that is empty or `?` does not say where.
_WHERE = re.compile(r"(MOVED|ASK) ([0-9]{1,5}) (\[?[\w.:%-]+\]?):([0-9]{1,5})(?: |$)", re.ASCII)

ASKING = b"*1\r\n$6\r\nASKING\r\n"


class Redirected(TierUnavailable):
    """A redirection: the key is at `address` from now on (`MOVED`), or this once (`ASK`)."""

    def __init__(self, message: str, *, slot: int, address: str, is_ask: bool) -> None:
        super().__init__(message, reason="connection")
        self.slot = slot
        self.address = address
        self.is_ask = is_ask


def is_redirect(reply: Any) -> bool:
    """True if an error reply says where else the key is: the node that gave it is well."""
    return str(reply).startswith(("MOVED ", "ASK "))


def refused(reply: Any) -> TierUnavailable:
    """An error reply as the reason why an answer is not known, whatever it says: who waits has no other end."""
    message = f"Redis refused: {reply}"
    if found := _WHERE.match(str(reply)):
        kind, slot, host, port = found.groups()
        if int(slot) < SLOTS and 0 < int(port) < 1 << 16:
            there = join_address(host.strip("[]"), int(port))
            return Redirected(message, slot=int(slot), address=there, is_ask=kind == "ASK")
    return TierUnavailable(message, reason="connection")
