"""Errors that callers of Larder may receive; each has a stable code, and details for its message."""

import re
from typing import ClassVar

TOKEN_PREFIX = "larder_"  # noqa: S105  no token itself
"""Prefix of every token that Larder generates, by which tokens are found in texts."""

_TOKEN_PATTERN = re.compile(rf"\b{TOKEN_PREFIX}[A-Za-z0-9_-]{{43}}(?![A-Za-z0-9_-])")
SECRET_OPTIONS = ("password", "sentinel_password")
"""Options in the URL of a Redis that are passwords."""

_SECRET_OPTION_PATTERN = re.compile(rf"([?&](?:{'|'.join(SECRET_OPTIONS)})=)[^&#\s'\"]+")
_URL_PASSWORD_PATTERN = re.compile(r"(://[^/\s:@'\"]*:)[^/\s@'\"]+@")


def mask_secrets(text: str) -> str:
    """Return the text with a mask in place of passwords in URLs and of tokens that Larder generated."""
    if TOKEN_PREFIX in text:
        text = _TOKEN_PATTERN.sub(f"{TOKEN_PREFIX}***", text)
    if "password=" in text:
        text = _SECRET_OPTION_PATTERN.sub(r"\g<1>***", text)
    return _URL_PASSWORD_PATTERN.sub(r"\g<1>***@", text) if "://" in text else text


class LarderError(Exception):
    """Base class of all of Larder's own errors; `details` holds the numbers and names in the message.

    Messages contain no password, since they go to probes, heartbeats and callers: stores are named by a URL without it.
    """

    code: ClassVar[str] = "larder_error"

    def __init__(self, message: str, **details: object) -> None:
        self.message = mask_secrets(message)
        super().__init__(self.message)
        self.details = details


class InvalidInput(LarderError):
    """The caller's input is invalid; sending it again fails again."""

    code = "invalid_input"


class InvalidId(InvalidInput):
    """An id is not 1 to 256 bytes of UTF-8 (integers become their decimal form)."""

    code = "invalid_id"


class ConfigError(LarderError):
    """A setting is missing, contradictory or out of range."""

    code = "config_error"


class SourceError(LarderError):
    """An input file of the night cannot be used."""

    code = "source_error"


class BundleError(LarderError):
    """A model bundle is incomplete or altered, or does not fit its tables."""

    code = "bundle_error"


class ModelFailed(BundleError):
    """ONNX Runtime opened a model but cannot run it on an input."""


class CorruptArtefact(LarderError):
    """Bytes do not match their checksum, size or format."""

    code = "corrupt_artefact"


class UnknownFormat(CorruptArtefact):
    """An artefact is intact but of a format version that this release does not read; do not repair or replace it."""

    code = "unknown_format"


class UnfitValue(LarderError):
    """A number does not fit its record's dtype: it is not finite, too large, or would become zero."""

    code = "unfit_value"


class StoreError(LarderError):
    """The artefact store, a source or a bundle cannot be read or written at the moment; a retry may succeed."""

    code = "store_error"


class TierUnavailable(LarderError):
    """L2 did not answer; `details["reason"]` is timeout, connection or breaker_open."""

    code = "l2_unavailable"


class NotJudged(LarderError):
    """A gate could not be judged because a dependency did not answer in time.

    The generation is not refused; judge it again.
    """

    code = "not_judged"


class Refused(LarderError):
    """A step was not taken because it would have harmed readers; `rule`, `value` and `threshold` say why."""

    code = "refused"


class Conflict(LarderError):
    """Another publisher moved the pointer, or the state machine does not allow the step."""

    code = "conflict"


class UnknownGeneration(LarderError):
    """This replica or host does not hold the generation."""

    code = "generation_gone"


def traceback_of(error: BaseException) -> BaseException | None:
    """Return a log line's `exc_info`: None if the text of an error of Larder or the operating system is enough."""
    return None if isinstance(error, LarderError | OSError) and str(error) else error
