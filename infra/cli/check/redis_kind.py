"""Kind and version of a server that speaks Redis' protocol, and what Larder needs or uses that it lacks."""

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import redis

FLAGGED: Final = "#!lua flags=allow-oom\nreturn 1"
"""Such scripts move the pointer and say that a replica lives, also at maxmemory."""
_UNREADABLE: Final = re.compile("compil|flag|shebang|unknown command", re.IGNORECASE)
"""In the error of a server that cannot read such a script."""
NEEDED: Final = tuple(
    """del eval evalsha exists expire get getrange hdel hget hgetall hlen hset incr info memory mget pexpire pfadd
    pfcount ping pttl publish script set setrange strlen subscribe time unlink unsubscribe wait xack xadd xautoclaim
    xdel xgroup xinfo xlen xrange xread xreadgroup xrevrange xtrim zadd zincrby zrangebyscore zrem zremrangebyrank
    zremrangebyscore zrevrange""".split()  # noqa: SIM905  # fifty words, one a line
)
"""Commands that nights, the service or events cannot do without."""
USED: Final = {
    "config": "settings are read from INFO, and how durable events are is tried out",
    "waitaof": "without CONFIG, too, no event is known to be durable",
}
"""Commands that are done without, and what follows."""


class RedisKind(NamedTuple):
    """Server as it describes itself, what is missing for Larder, and what Larder does without."""

    name: str
    version: str
    missing: tuple[str, ...]
    without: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def kind_of(server: "redis.Redis") -> RedisKind:
    """Looks at one server by INFO, a script and COMMAND INFO; whatever this user may not ask is taken to be there.

    Raises redis.ResponseError where the server refuses to run scripts at the moment.
    """
    from redis.exceptions import NoPermissionError, ResponseError

    from cache.resp.reply_shapes import WrongReply, refuse

    server_info: dict[str, Any] = server.info("server")
    name, version = _named(server_info)
    missing = []
    try:
        server.eval(FLAGGED, 0)
    except NoPermissionError:
        pass
    except ResponseError as error:
        # All else (a read-only replica, a disk that is full) is no matter of its version: who asked tells it.
        if type(error) is not ResponseError or not _UNREADABLE.search(str(error)):
            raise
        missing.append("scripts with flags (Redis 7.0, Valkey and newer have them)")
    names = (*NEEDED, *USED)
    try:
        command_infos: Any = server.execute_command("COMMAND INFO", *names)  # type: ignore[no-untyped-call]
        if len(command_infos) != len(names):
            refuse("COMMAND INFO", command_infos, "as many commands as were asked for")
    except WrongReply:
        raise
    except ResponseError:
        command_infos = names
    known_commands = {
        name for name, command_info in zip(names, command_infos, strict=True) if command_info
    }
    missing += [command.upper() for command in NEEDED if command not in known_commands]
    # Events wait for the disk only where no setting tells how durable they are.
    lacking = (
        ()
        if "config" in known_commands
        else [command for command in USED if command not in known_commands]
    )
    without = [f"{command.upper()} ({USED[command]})" for command in lacking]
    return RedisKind(name, version, tuple(missing), tuple(without))


def _named(server_info: dict[str, Any]) -> tuple[str, str]:
    if "dragonfly_version" in server_info:
        return "Dragonfly", str(server_info["dragonfly_version"]).removeprefix("df-").removeprefix(
            "v"
        )
    if server_info.get("server_name") == "valkey":
        return "Valkey", str(server_info.get("valkey_version", ""))
    # KeyDB calls itself Redis in all but the name of its program.
    is_keydb = "keydb" in str(server_info.get("executable", ""))
    return "KeyDB" if is_keydb else "Redis", str(server_info.get("redis_version", ""))
