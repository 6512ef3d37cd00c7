"""Errors that a caller of Larder may meet; each has a stable code and the facts behind its message."""

import re
from typing import ClassVar

TOKEN_PREFIX = "larder_"  # noqa: S105  no token itself
"""Beginning of every token that is made here, by which texts are searched for them."""

_TOKEN_PATTERN = re.compile(rf"\b{TOKEN_PREFIX}[A-Za-z0-9_-]{{43}}(?![A-Za-z0-9_-])")
SECRET_OPTIONS = ("password", "sentinel_password")
"""Options of a Redis' URL that are passwords."""

_SECRET_OPTION_PATTERN = re.compile(rf"([?&](?:{'|'.join(SECRET_OPTIONS)})=)[^&#\s'\"]+")
_URL_PASSWORD_PATTERN = re.compile(r"(://[^/\s:@'\"]*:)[^/\s@'\"]+@")


def mask_secrets(text: str) -> str:
    """The text with a mask in place of the passwords of any URL in it, and of any token that was made here."""
    if TOKEN_PREFIX in text:
        text = _TOKEN_PATTERN.sub(f"{TOKEN_PREFIX}***", text)
    if "password=" in text:
        text = _SECRET_OPTION_PATTERN.sub(r"\g<1>***", text)
    return _URL_PASSWORD_PATTERN.sub(r"\g<1>***@", text) if "://" in text else text


class LarderError(Exception):
    """Base of all of Larder's own errors; `details` holds the numbers and names behind the message.

    No message has a password in it: stores are named by their URL, and messages go to probes, heartbeats and callers.
    """

    code: ClassVar[str] = "larder_error"

    def __init__(self, message: str, **details: object) -> None:
        self.message = mask_secrets(message)
        super().__init__(self.message)
        self.details = details


class InvalidInput(LarderError):
    """The caller's input is invalid and would be refused again."""

    code = "invalid_input"


class InvalidId(InvalidInput):
    """An id is not 1 to 256 bytes of UTF-8 (integers become their decimal form)."""

    code = "invalid_id"


class ConfigError(LarderError):
    """A setting is missing, contradictory or out of range."""

    code = "config_error"


class SourceError(LarderError):
    """An input file of the night cannot be used as it is."""

    code = "source_error"


class BundleError(LarderError):
    """A model bundle is incomplete, was altered, or does not fit its tables."""

    code = "bundle_error"


class ModelFailed(BundleError):
    """ONNX Runtime opened a model and cannot run it on an input."""


class CorruptArtefact(LarderError):
    """Bytes that do not match their checksum, size or format."""

    code = "corrupt_artefact"


class UnknownFormat(CorruptArtefact):
    """An artefact is intact but of a format version that this release does not read; do not repair or replace it."""

    code = "unknown_format"


class UnfitValue(LarderError):
    """A number does not fit its record's dtype (non-finite, too large, or lost to zero)."""

    code = "unfit_value"


class StoreError(LarderError):
    """The artefact store, a source or a bundle cannot be read or written now; a retry may succeed."""

    code = "store_error"


class TierUnavailable(LarderError):
    """L2 did not answer; `details["reason"]` is timeout, connection or breaker_open."""

    code = "l2_unavailable"


class NotJudged(LarderError):
    """A gate could not be judged: a dependency did not answer, or not in time. Nothing is refused; judge again."""

    code = "not_judged"


class Refused(LarderError):
    """A step that would have harmed readers was not taken; `rule`, `value` and `threshold` say why."""

    code = "refused"


class Conflict(LarderError):
    """Another publisher moved the pointer, or the state machine does not allow the step."""

    code = "conflict"


class UnknownGeneration(LarderError):
    """This replica or host does not hold the generation."""

    code = "generation_gone"
