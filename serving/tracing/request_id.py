"""The name of a request, in logs, spans and its response."""

import itertools
import re
import secrets

_VALID = re.compile(rb"[A-Za-z0-9._~:+/=@-]{1,128}")
_process_prefix = secrets.token_hex(6)
_number = itertools.count(1)


def accepted(sent_id: bytes | None) -> str | None:
    """A caller's own id: 1 to 128 letters, digits and `._~:+/=@-`; None for anything else, which no log shall hold."""
    return sent_id.decode("ascii") if sent_id is not None and _VALID.fullmatch(sent_id) else None


def new_id() -> str:
    """New id that no other process makes: a random part of this one's own, and a number."""
    return f"{_process_prefix}-{next(_number):x}"
