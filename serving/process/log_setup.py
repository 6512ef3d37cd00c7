"""Log setup: one line per record to standard error, as text or JSON, without secrets, at a bounded rate."""

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_plus, urlsplit

import orjson

from cache.errors import SECRET_OPTIONS, mask_secrets
from serving.requests.request_record import current_record

if TYPE_CHECKING:
    from cache.config.serving import ServingConfig  # loads pydantic, which --help does not need

TEXT_LENGTH_MAX = 16_384
"""Largest number of characters of one text; longer tracebacks are cut."""

BURST_RECORDS = 20.0
"""Log records per place in the program that may come in one burst."""

RECORD_FIELDS_ATTRIBUTE = "larder_fields"
"""Attribute of a log record with further fields of its line, by name."""

_MASK_TEXT = "***"

_BEARER_PATTERN = re.compile(r"(?i)\b(bearer\s+)[^\s'\",;]+")

_LOG_SITES_MAX = 1_024


def configure_for(settings: "ServingConfig", log_level: str, *, worker_slot: int | None = None) -> None:
    """Send all log output of this process to standard error, in place of earlier handlers."""
    urls = (settings.redis_url, settings.events_url, settings.artifacts)
    redact = Redactor({settings.token} | passwords_of(*urls))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if settings.log == "json" else TextFormatter)(redact, worker_slot))
    handler.addFilter(LogRateLimit(settings.log_lines_per_s))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it logs each of its variants that it cannot import


def record_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the record's own fields, and those that identify its request."""
    line_fields = dict(getattr(record, RECORD_FIELDS_ATTRIBUTE, None) or {})
    if (request_record := current_record()) is not None and "request_id" not in line_fields:
        line_fields |= request_record.log_ids()
    if dropped_count := getattr(record, "larder_dropped", 0):
        line_fields["dropped"] = dropped_count
    return line_fields


class Redactor:
    """Redactor that masks its secrets, passwords in any URL, and bearer tokens; cuts a text that is too long."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def __call__(self, masked_text: str) -> str:
        """Return the text with secrets masked, cut if it is too long."""
        for secret in self._secrets:
            masked_text = masked_text.replace(secret, _MASK_TEXT)
        masked_text = _BEARER_PATTERN.sub(rf"\g<1>{_MASK_TEXT}", mask_secrets(masked_text))
        return masked_text if len(masked_text) <= TEXT_LENGTH_MAX else f"{masked_text[:TEXT_LENGTH_MAX]}... (cut)"


def passwords_of(*urls: str) -> set[str]:
    """Return the passwords in URLs, as written and percent-decoded."""
    passwords: set[str] = set()
    for url in urls:
        netloc = urlsplit(url).netloc if "://" in url else ""
        password = netloc.rpartition("@")[0].partition(":")[2]
        passwords |= {password, unquote(password)} - {""}
        for query_option in url.partition("?")[2].partition("#")[0].split("&"):
            option_name, _, option_value = query_option.partition("=")
            if option_name in SECRET_OPTIONS:
                passwords |= {option_value, unquote_plus(option_value)} - {""}
    return passwords


def _utc_text(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """Formatter to one JSON object per line; `time` is in UTC, the traceback is one text."""

    def __init__(self, redact: Redactor, worker_slot: int | None = None) -> None:
        super().__init__()
        self._redact = redact
        self._worker_field = {} if worker_slot is None else {"worker": worker_slot}

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line of JSON, without secrets."""
        line_fields: dict[str, Any] = {
            "time": _utc_text(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._worker_field,
            **record_fields(record),
        }
        if record.exc_info:
            line_fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(self._redacted(line_fields), default=str).decode()

    def _redacted(self, field_value: Any) -> Any:
        if isinstance(field_value, str):
            return self._redact(field_value.encode(errors="replace").decode())
        if isinstance(field_value, dict):
            return {name: self._redacted(inner_field_value) for name, inner_field_value in field_value.items()}
        return field_value


class TextFormatter(logging.Formatter):
    """Formatter to text for people: time in UTC, level, logger, message, then the fields as `name=value`."""

    def __init__(self, redact: Redactor, worker_slot: int | None = None) -> None:
        worker_prefix = "" if worker_slot is None else f"worker {worker_slot} "
        super().__init__(f"%(asctime)s %(levelname)s {worker_prefix}%(name)s: %(message)s")
        self._redact = redact

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """Format the record's time as JSON lines have it."""
        return _utc_text(record.created)

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line, and the traceback below it, without secrets."""
        first_line, newline, traceback_text = super().format(record).partition("\n")
        fields_text = "".join(f" {name}={value}" for name, value in record_fields(record).items())
        return self._redact(f"{first_line}{fields_text}{newline}{traceback_text}")


class LogRateLimit(logging.Filter):
    """Rate limit: `records_per_s` for each place in the program, after an initial burst.

    The first record that passes after dropped ones says how many were dropped.
    """

    def __init__(self, records_per_s: float, monotonic_clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._records_per_s = records_per_s
        self._monotonic_clock = monotonic_clock
        self._lock = threading.Lock()
        self._bucket_by_location: dict[tuple[str, int, int], _Bucket] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record may be written; store in it how many were dropped before."""
        log_site = record.name, record.lineno, record.levelno
        with self._lock:
            now_s = self._monotonic_clock()
            bucket = self._bucket_by_location.get(log_site)
            if bucket is None:
                if len(self._bucket_by_location) >= _LOG_SITES_MAX:
                    self._bucket_by_location.clear()
                bucket = self._bucket_by_location[log_site] = _Bucket(now_s)
            dropped_count = bucket.take_token(now_s, self._records_per_s)
        if dropped_count:
            record.larder_dropped = dropped_count
        return dropped_count is not None


class _Bucket:
    """Token bucket of one place in the program."""

    def __init__(self, now_s: float) -> None:
        self._tokens, self._refilled_at, self._dropped_count = BURST_RECORDS, now_s, 0

    def take_token(self, now_s: float, records_per_s: float) -> int | None:
        """Take a token; return None if the record has to be dropped, else the number dropped before it."""
        self._tokens = min(BURST_RECORDS, self._tokens + (now_s - self._refilled_at) * records_per_s)
        self._refilled_at = now_s
        if self._tokens < 1.0:
            self._dropped_count += 1
            return None
        self._tokens -= 1.0
        dropped_count, self._dropped_count = self._dropped_count, 0
        return dropped_count
