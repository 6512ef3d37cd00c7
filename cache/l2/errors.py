"""Conversion of Redis' errors to Larder's: for readers, for steps of the night, and for redirections."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import exceptions

from cache.errors import ConfigError, LarderError, Refused, TierUnavailable
from cache.l2.slots import SLOT_COUNT, join_address

HANDLER_CLOSED_MESSAGE = "the handler is closed"
"""End of the RuntimeError that uvloop raises if the transport closed before the command was written."""

# The pattern accepts an IPv6 address without brackets; an empty host or `?` does not name the target.
_REDIRECT_PATTERN = re.compile(r"(MOVED|ASK) ([0-9]{1,5}) (\[?[\w.:%-]+\]?):([0-9]{1,5})(?: |$)", re.ASCII)

_TLS_FILE_PATTERN = re.compile(r"Error 2 connecting to [^/ ]+:[0-9]+\.")
"""Pattern of the error of a connection over TCP for a file that does not exist: one that TLS needs."""

NO_USER_HINT = " (the URL names no user, as in redis://USER:PASSWORD@HOST)"

_KEY_REFUSED_PATTERN = re.compile("access (a|one of the) keys?")
"""Pattern of the error for a user who may run the command but not on this key."""


class Redirected(TierUnavailable):
    """Redirection: the key is at `address` from now on (`MOVED`), or for this command only (`ASK`)."""

    def __init__(self, message: str, *, slot: int, address: str, is_ask: bool) -> None:
        super().__init__(message, reason="connection")
        self.slot = slot
        self.address = address
        self.is_ask = is_ask


def is_redirect(error_reply: Any) -> bool:
    """Return whether an error reply is a redirection, which a healthy node may send."""
    return str(error_reply).startswith(("MOVED ", "ASK "))


def error_from_reply(error_reply: Any) -> TierUnavailable:
    """Convert any error reply to Redirected or TierUnavailable, so that no read waits forever."""
    message = f"Redis refused: {error_reply}"
    if redirect_match := _REDIRECT_PATTERN.match(str(error_reply)):
        kind, slot, host, port = redirect_match.groups()
        if int(slot) < SLOT_COUNT and 0 < int(port) < 1 << 16:
            target_address = join_address(host.strip("[]"), int(port))
            return Redirected(message, slot=int(slot), address=target_address, is_ask=kind == "ASK")
    return TierUnavailable(message, reason="connection")


def describe_connection_error(error: BaseException) -> str:
    """Return the text of an error of redis-py, with a remark if it is about a missing file of TLS."""
    tls_remark = " (a file that an ssl_ option of the URL names does not exist)"
    return f"{error}{tls_remark if _TLS_FILE_PATTERN.search(str(error)) else ''}"


@contextmanager
def as_unavailable() -> Iterator[None]:
    """Convert errors of Redis and its connection to TierUnavailable, on which readers use the next source."""
    try:
        yield
    except (exceptions.RedisError, OSError) as error:
        is_timeout = isinstance(error, exceptions.TimeoutError | TimeoutError)
        reason = "timeout" if is_timeout else "connection"
        raise TierUnavailable(f"Redis: {error}", reason=reason) from error
    except RuntimeError as error:
        if not str(error).endswith(HANDLER_CLOSED_MESSAGE):
            raise
        raise TierUnavailable("Redis closed the connection", reason="connection") from error


@contextmanager
def translate_redis_errors(shown_url: str = "", url_variable: str = "REDIS_URL", namespace: str = "") -> Iterator[None]:
    """Convert Redis errors to Larder's, with a remedy for the operator; `shown_url` is the URL without its password.

    `url_variable` is the environment variable that holds the URL, `namespace` the namespace whose keys are used.
    """
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException) as error:
        raise _error_with_remedy(
            error, f"{url_variable} {shown_url}" if shown_url else url_variable, url_variable, namespace
        ) from error


def _error_with_remedy(error: Exception, variable_and_url: str, url_variable: str, namespace: str) -> LarderError:
    match error:
        case exceptions.OutOfMemoryError():
            return Refused(
                "Redis is at maxmemory and refused to store more: raise maxmemory or retire generations, then run the "
                "same command again",
                rule="redis_memory",
            )
        case exceptions.ReadOnlyError():
            message = f"Redis is a read-only replica; point {url_variable} at the primary"
        case exceptions.NoPermissionError() if namespace and _KEY_REFUSED_PATTERN.search(str(error)):
            return ConfigError(
                f"Redis refused the user of {url_variable}: {error}; its rights are not for namespace "
                f"`{namespace}`; is "
                "LARDER_NAMESPACE right?",
                namespace=namespace,
            )
        case exceptions.NoPermissionError():
            acl_file = "redis-events.conf" if url_variable == "LARDER_EVENTS_URL" else "redis.conf"
            return ConfigError(
                f"Redis refused the user of {url_variable}: {error}; it needs the loader's ACL (`user larder-loader` "
                f"in infra/{acl_file})"
            )
        case exceptions.AuthenticationError():
            return ConfigError(
                f"Redis refused user and password ({variable_and_url}): {error}; correct them in {url_variable}"
                + (NO_USER_HINT if "://" in variable_and_url and "@" not in variable_and_url else "")
            )
        case exceptions.BusyLoadingError():
            message = f"Redis is still loading its data: {error}; wait for it, then run the step again"
        case exceptions.TimeoutError():
            return TierUnavailable(
                f"Redis did not answer in time ({variable_and_url}): {error}; run the step again, or raise "
                "redis_timeout_s",
                reason="timeout",
            )
        case exceptions.ConnectionError():
            message = (
                f"Redis cannot be reached ({variable_and_url}): {describe_connection_error(error)}; "
                f"start it or correct {url_variable}, "
                f"then run the "
                "step again"
            )
        case exceptions.InvalidResponse():
            message = (
                f"the server at {variable_and_url} does not answer as Redis does: {error}; check that the address is "
                "Redis', then "
                "run the step again"
            )
        case exceptions.AskError():
            return ConfigError(
                f"{variable_and_url} is a node of a Redis Cluster: write redis+cluster:// (with TLS rediss+cluster://)"
            )
        case exceptions.RedisClusterException():
            message = (
                f"the Redis Cluster cannot be used ({variable_and_url}): {error}; start its nodes or correct "
                f"{url_variable}, then run "
                "the step again"
            )
        case _:
            message = f"Redis refused a command: {error}; correct the cause, then run the step again"
    return TierUnavailable(message, reason="connection")
