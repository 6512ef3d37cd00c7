"""Keeps secrets out of what is written down. Pure."""

import re
from collections.abc import Iterable
from urllib.parse import unquote, unquote_plus, urlsplit

from cache.errors import SECRET_OPTIONS, masked

_MASK = "***"
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s'\",;]+")
LENGTH_MAX = 16_384
"""Characters of one text; a traceback of any depth ends there."""


class Redactor:
    """Masks the secrets it was told of, passwords in any URL, and bearer tokens; cuts what is too long."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """The text with secrets masked, cut where it is too long."""
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        text = _BEARER.sub(rf"\g<1>{_MASK}", masked(text))
        return text if len(text) <= LENGTH_MAX else f"{text[:LENGTH_MAX]}... (cut)"


def passwords_of(*urls: str) -> set[str]:
    """The passwords of URLs, as written and as meant."""
    passwords: set[str] = set()
    for url in urls:
        netloc = urlsplit(url).netloc if "://" in url else ""
        password = netloc.rpartition("@")[0].partition(":")[2]
        passwords |= {password, unquote(password)} - {""}
        for option in url.partition("?")[2].partition("#")[0].split("&"):
            name, _, value = option.partition("=")
            if name in SECRET_OPTIONS:
                passwords |= {value, unquote_plus(value)} - {""}
    return passwords
