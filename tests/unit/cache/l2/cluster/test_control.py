"""The control plane of a cluster: the node of the control keys is asked, or all of them, or one is listened to."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.crc import key_slot

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.cluster import ClusterControl, Nodes

KEYSPACE = Keyspace("test")


class FakeNodes:
    """Nodes by name; `home` serves the control keys, and a reply that is an error is raised."""

    def __init__(self, home: str, replies: dict[str, Any]) -> None:
        self.home = home
        self.slots: list[int] = []
        self.listened: list[str] = []
        self.tiers = [self._tier(name, reply) for name, reply in replies.items()]

    def _tier(self, name: str, reply: Any) -> Any:
        async def answer_command(*command: Any) -> Any:
            if isinstance(reply, Exception):
                raise reply
            return (name, reply, command)

        async def ask_all(commands: Any) -> Any:
            return [await answer_command(*command) for command in commands]

        async def subscribe(channel: str | None) -> AsyncGenerator[bytes, None]:
            self.listened.append(name)
            yield f"{name} {channel}".encode()
            raise TierUnavailable("gone")

        control = SimpleNamespace(execute=answer_command, execute_all=ask_all, subscribe=subscribe)
        return SimpleNamespace(name=name, control=control)

    async def ready(self) -> None:
        """They are."""

    async def call_owner(self, slot: int, question: Callable[[Any], Awaitable[Any]]) -> Any:
        """The reply of the control keys' node."""
        self.slots.append(slot)
        return await question(next(tier for tier in self.tiers if tier.name == self.home))


def control_of(nodes: FakeNodes) -> ClusterControl:
    return ClusterControl(KEYSPACE, cast(Nodes, nodes))


async def test_control_keys_are_asked_of_the_node_of_their_slot() -> None:
    nodes = FakeNodes("b", {"a": 1, "b": 2})
    control = control_of(nodes)

    assert await control.execute("GET", "x") == ("b", 2, ("GET", "x"))
    assert await control.execute_all([("GET", "x"), ("GET", "y")]) == [
        ("b", 2, ("GET", "x")), ("b", 2, ("GET", "y")),
    ]  # fmt: skip
    assert set(nodes.slots) == {key_slot(KEYSPACE.live.encode())}


async def test_of_all_servers_one_without_a_reply_is_reported_and_a_refusal_is_raised() -> None:
    unavailable, refused = TierUnavailable("gone"), ValueError("NOPERM")

    server_replies = await control_of(FakeNodes("a", {"a": 1, "b": unavailable})).execute_on_servers("INFO")

    assert server_replies == [("a", 1, ("INFO",)), unavailable]
    with pytest.raises(ValueError, match="NOPERM"):
        await control_of(FakeNodes("a", {"a": 1, "b": refused})).execute_on_servers("INFO")


async def test_after_an_error_the_next_node_is_listened_to() -> None:
    nodes = FakeNodes("a", {"a": 1, "b": 2})
    control = control_of(nodes)

    messages = []
    for _ in range(3):
        stream = control.subscribe("news")
        messages.append(await anext(stream))
        with pytest.raises(TierUnavailable):
            await anext(stream)

    assert messages == [b"a news", b"b news", b"a news"] and nodes.listened == ["a", "b", "a"]
