"""Ends of replies and commands in bytes of Redis' protocol, without their meaning."""

_LINES = b"+-:_,#(!=$"
_AGGREGATE_FACTORS = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
_BULK = b"$=!"


def reply_end(data: bytes, at: int = 0) -> int | None:
    """Return where the first reply from `at` on ends, None if incomplete; raise ValueError for other bytes."""
    pending = 1
    while pending:
        stop = data.find(b"\r\n", at)
        if stop < 0:
            return None
        kind, text = data[at : at + 1], data[at + 1 : stop]
        pending -= 1
        at = stop + 2
        if kind in _AGGREGATE_FACTORS:
            pending += max(0, int(text)) * _AGGREGATE_FACTORS[kind]
            pending += kind == b"|"  # attributes stand before the reply that they belong to
        elif kind and kind in _BULK:
            if int(text) >= 0:
                at += int(text) + 2
        elif not kind or kind not in _LINES:
            raise ValueError(f"no reply begins with {kind!r}")
        if at > len(data):
            return None
    return at


def command_words(data: bytes, at: int = 0) -> tuple[list[bytes], int] | None:
    """Return the words of the first command from `at` on and its end; None if incomplete."""
    end = reply_end(data, at)
    if end is None:
        return None
    command_parts, at = [], data.index(b"\r\n", at) + 2
    while at < end:
        stop = data.index(b"\r\n", at)
        size = int(data[at + 1 : stop])
        command_parts.append(data[stop + 2 : stop + 2 + size])
        at = stop + 2 + size + 2
    return command_parts, end


_PARENTS = (
    "CLIENT",
    "CLUSTER",
    "CONFIG",
    "FUNCTION",
    "SCRIPT",
    "XGROUP",
    "XINFO",
    "ACL",
    "MEMORY",
    "OBJECT",
    "COMMAND",
)


def command_name(command_parts: list[bytes]) -> str:
    """Name of a command in capitals, with that of its subcommand."""
    name = command_parts[0].decode("latin-1").upper()
    if name in _PARENTS and len(command_parts) > 1:
        return f"{name} {command_parts[1].decode('latin-1').upper()}"
    return name
