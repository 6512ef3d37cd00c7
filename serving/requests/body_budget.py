"""Budget of the bytes of request bodies held at once, over all requests of a process."""

from starlette.types import Message, Receive

from serving.requests.errors import Problem

BYTES_MAX = 64 << 20


class BodyBudget:
    """Budget of request bodies in bytes, for one event loop."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0

    def of(self, receive: Receive) -> "BudgetedBody":
        """The body of one request, counted as it is read."""
        return BudgetedBody(self, receive)


class BudgetedBody:
    """Body of one request; its bytes count against the budget until the context ends."""

    __slots__ = ("_all", "_receive", "_size")

    def __init__(self, bodies: BodyBudget, receive: Receive) -> None:
        self._all, self._receive = bodies, receive
        self._size = 0

    def __enter__(self) -> Receive:
        return self.receive

    def __exit__(self, *_: object) -> None:
        self._all.held_bytes -= self._size

    async def receive(self) -> Message:
        """The next message; raises Problem 503 where the bodies of others leave no room for it."""
        message = await self._receive()
        size = len(message.get("body", b""))
        if self._all.held_bytes + size > self._all.bytes_max:
            problem_message = (
                f"bodies of all requests together have at most {self._all.bytes_max} bytes at once"
            )
            raise Problem(
                503, "overloaded", problem_message, field="body", limit=self._all.bytes_max
            )
        self._all.held_bytes += size
        self._size += size
        return message
