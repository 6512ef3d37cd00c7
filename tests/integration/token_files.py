"""Tokens of a test, their file, and a service's replies to them."""

import hashlib
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.access.token_file import MEANING_BY_SCOPE, TokenEntry, write_tokens

EXPIRED = "2020-01-01T00:00:00+00:00"


@dataclass
class TokenPlace:
    """A tokens file, and the tokens of its hashes by name."""

    path: Path
    tokens: dict[str, str] = field(default_factory=dict)
    entries: dict[str, TokenEntry] = field(default_factory=dict)

    def add(self, name: str, *scopes: str, **limits: Any) -> dict[str, str]:
        """Add a new token to the file; return its owner's header."""
        token = f"larder_{secrets.token_urlsafe(32)}"
        digest = hashlib.sha256(token.encode()).hexdigest()
        self.tokens[name] = token
        self.entries[name] = TokenEntry(sha256=digest, scopes=scopes or tuple(MEANING_BY_SCOPE), **limits)
        self.write()
        return self.header(name)

    def header(self, name: str) -> dict[str, str]:
        """Return the header that the owner of a token sends."""
        return {"Authorization": f"Bearer {self.tokens[name]}"}

    def drop(self, name: str) -> None:
        """Remove an entry from the file; the token is still known here."""
        del self.entries[name]
        self.write()

    def write(self) -> None:
        """Replace the file."""
        write_tokens(self.path, self.entries)
