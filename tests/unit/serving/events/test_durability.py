"""What a Redis promises of its events, and what is made of it when it does not tell."""

from typing import Any

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from cache.config.events import Durability
from serving.events.connection import FoundDurability, find_durability


def server(config: list[bytes] | None = None, info: bytes | None = None, *, has_waitaof: bool = False) -> Any:
    """A server's replies; None: this user may not ask."""

    async def send_command(*command_parts: str) -> Any:
        reply: Any = {"CONFIG GET": config, "INFO": info}.get(command_parts[0])
        if command_parts[0] == "WAITAOF" and has_waitaof:
            return [0, 0]
        if command_parts[0] == "WAITAOF":
            raise ResponseError("unknown command 'WAITAOF'")
        if reply is None:
            raise NoPermissionError("no permissions")
        return reply

    return send_command


def make_config_reply(appendonly: bytes, fsync: bytes) -> list[bytes]:
    return [b"appendfsync", fsync, b"appendonly", appendonly, b"appendfilename", b"x"]


PAUSES = [b"no-appendfsync-on-rewrite", b"yes"]


@pytest.mark.parametrize(
    ("send_command", "demanded", "expected"),
    [
        (server(make_config_reply(b"yes", b"always")), "any", FoundDurability("always")),
        (server(make_config_reply(b"yes", b"everysec")), "always", FoundDurability("everysec")),
        (server(make_config_reply(b"yes", b"no")), "any", FoundDurability("none")),
        (server(make_config_reply(b"no", b"always")), "any", FoundDurability("none")),
        (server([*make_config_reply(b"yes", b"always"), *PAUSES]), "always", FoundDurability("none")),
        (server(None, b"# Persistence\r\naof_enabled:0\r\n"), "any", FoundDurability("none")),
        (server(None, b"aof_enabled:1\r\n"), "everysec", FoundDurability("unknown")),
        (server(None, b"aof_enabled:1\r\n", has_waitaof=True), "any", FoundDurability("unknown")),
        (
            server(None, b"aof_enabled:1\r\n", has_waitaof=True), "always",
            FoundDurability("always", waits_for_disk=True),
        ),
        (server(), "any", FoundDurability("unknown")),
        (server([], None), "any", FoundDurability("unknown")),
    ],
)  # fmt: skip
async def test_settings_first_then_what_the_log_says(
    send_command: Any, demanded: Durability, expected: FoundDurability
) -> None:
    assert await find_durability(send_command, demanded) == expected


@pytest.mark.parametrize(
    ("persistence", "demands"),
    [
        ("always", {"any", "everysec", "always"}),
        ("everysec", {"any", "everysec"}),
        ("none", {"any"}),
        ("unknown", {"any"}),
    ],
)
def test_less_than_is_demanded_does_not_suffice(persistence: Any, demands: set[str]) -> None:
    durability = FoundDurability(persistence)

    for demanded in ("any", "everysec", "always"):
        assert durability.suffices(demanded) == (demanded in demands)
