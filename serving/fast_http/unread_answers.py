"""Budget of the answers that peers have not taken yet, in bytes over all connections of a process."""

from typing import Final, Protocol

SLOW_S: Final = 1.0
"""Seconds for which a peer may let a large answer wait before its connection counts as slow. One that reads, however
far away, takes megabytes in less."""


class Reader(Protocol):
    """A connection whose peer has to read before more can be sent."""

    def unread_bytes(self) -> int:
        """Bytes of answers that are not sent yet."""

    def cut_off(self) -> None:
        """End the connection at once, with what is not sent yet."""


class UnreadAnswers:
    """Connections with more than a buffer of unsent answers, and the bytes of all of them, for one event loop.

    Beyond `bytes_max` slow ones are cut off, the one that has waited longest first. If that is not enough, `is_full`
    says that no large answer should be begun.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.cut = 0
        """Connections cut off since the start."""
        self._waiting_since_by_reader: dict[Reader, float] = {}  # the longest first
        self._bytes: dict[Reader, int] = {}
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes held, as of when each connection was looked at last."""
        return self._held_bytes

    def add(self, reader: Reader, now_s: float) -> None:
        """Count what a connection holds whose buffer is full."""
        self._waiting_since_by_reader.setdefault(reader, now_s)
        self._count(reader)
        if self._held_bytes > self.bytes_max:
            self._cut_slow(now_s)

    def remove(self, reader: Reader) -> None:
        """Stop counting a connection that can be written to again, or is gone."""
        if self._waiting_since_by_reader.pop(reader, None) is not None:
            self._held_bytes -= self._bytes.pop(reader)

    def is_full(self, now_s: float) -> bool:
        """Return whether the budget is spent on peers that are not slow enough to be cut off."""
        if self._held_bytes > self.bytes_max:
            self._cut_slow(now_s)
        return self._held_bytes > self.bytes_max

    def _count(self, reader: Reader) -> None:
        size = reader.unread_bytes()
        self._held_bytes += size - self._bytes.get(reader, 0)
        self._bytes[reader] = size

    def _cut_slow(self, now_s: float) -> None:
        for reader in self._waiting_since_by_reader:
            self._count(reader)
        for reader, full_since_s in list(self._waiting_since_by_reader.items()):
            if self._held_bytes <= self.bytes_max or now_s - full_since_s < SLOW_S:
                return
            self.remove(reader)
            self.cut += 1
            reader.cut_off()
