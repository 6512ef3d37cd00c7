"""Callers: the senders of requests, identified by the tokens in force, and their permissions."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.errors import ConfigError
from cache.process.background_loops import BackgroundLoops, cancel_and_wait
from cache.store.artefacts import file_version
from serving.access.quota import Quota, QuotaTable, Shortage, quota_exceeded, row_key
from serving.access.token_file import DEFAULT_CALLER_NAME, MEANING_BY_SCOPE, Scope, TokenEntries, read_tokens
from serving.requests.errors import Problem
from serving.requests.request_record import CALLER_KEY

log = logging.getLogger(__name__)

TOKENS_CHECK_INTERVAL_S = 0.5
"""Seconds between checks of the tokens file."""

TOKEN_BYTES_MAX = 4_096
"""Bytes of a token; a longer one is never valid."""

_BEARER_PREFIX = b"bearer "

_ENTITIES_CHARGED_KEY = "larder.spent"

REFUSAL_REASONS = ("expired", "scope_missing", "requests_per_s", "entities_per_s", "in_flight")
"""Reasons for which a request with a known token is refused."""

FileVersion = tuple[int, int, int] | None


class CallerCounts:
    """Counts of one token's requests, and of its refused requests by reason; kept while its name is in the file."""

    __slots__ = ("refusals_by_reason", "request_count")

    def __init__(self) -> None:
        self.request_count = 0
        self.refusals_by_reason = dict.fromkeys(REFUSAL_REASONS, 0)


class Caller:
    """Owner of a token: its name, scopes, expiry (Unix seconds) and quota, never the token itself."""

    __slots__ = ("_clock", "counts", "expires_at", "has_quota_or_expiry", "name", "quota", "scopes")

    def __init__(
        self,
        token_name: str,
        token_scopes: Iterable[str],
        request_counts: CallerCounts,
        expires_at: float = float("inf"),
        quota: Quota | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.scopes, self.counts = token_name, frozenset(token_scopes), request_counts
        self.expires_at, self.quota = expires_at, quota
        self.has_quota_or_expiry = quota is not None or expires_at != float("inf")
        self._clock = clock

    @property
    def is_expired(self) -> bool:
        """True once the token has expired."""
        return self.expires_at != float("inf") and self._clock() >= self.expires_at

    @property
    def is_known(self) -> bool:
        """True if the caller has a scope and has not expired: only then is a request's body read."""
        return bool(self.scopes) and not self.is_expired

    def may_use_scope(self, scope: Scope) -> bool:
        """True if a request that needs this scope may be answered."""
        return scope in self.scopes and not self.is_expired

    def require_scope(self, scope: Scope) -> None:
        """Raise Problem (401, 403), and count the refusal, unless the caller has this scope and has not expired."""
        if not self.scopes:
            raise Problem(401, "unauthorized", "send Authorization: Bearer <token>")
        if self.is_expired:
            self.counts.refusals_by_reason["expired"] += 1
            raise Problem(401, "token_expired", "this token has expired: ask the operator for a new one")
        if scope not in self.scopes:
            self.counts.refusals_by_reason["scope_missing"] += 1
            raise Problem(
                403, "scope_missing", f"this needs a token with the scope {scope}", scope=scope,
                scopes=sorted(self.scopes),
            )  # fmt: skip

    def count_quota_refusal(self, shortage: Shortage) -> Problem:
        """Return the refusal of a request that exceeds the quota, and count it."""
        self.counts.refusals_by_reason[shortage.kind] += 1
        return quota_exceeded(shortage)


ANYBODY = Caller("", MEANING_BY_SCOPE, CallerCounts())
"""Caller of a service without tokens."""

STRANGER = Caller("", (), CallerCounts())
"""Caller without a token, or with an unknown one."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Return the caller that was identified when the request was accepted; STRANGER if none was."""
    caller: Caller = scope.get(CALLER_KEY, STRANGER)
    return caller


def enter_quota(scope: MutableMapping[str, Any], *, is_of_one_entity: bool) -> AbstractContextManager[object]:
    """Charge a request, and its entity if `is_of_one_entity`, to its caller's quota; raise Problem (429) if exceeded.

    The request is in flight until the context ends.
    """
    caller = caller_of(scope)
    quota = caller.quota
    if quota is None or caller.is_expired:
        return contextlib.nullcontext()
    if (shortage := quota.enter_request(int(is_of_one_entity))) is not None:
        raise caller.count_quota_refusal(shortage)
    if is_of_one_entity:
        scope[_ENTITIES_CHARGED_KEY] = True
    return contextlib.closing(quota)


def spend_quota(scope: MutableMapping[str, Any], entity_count: int) -> None:
    """Charge a request's entities to its caller's quota, once per request; raise Problem (429) if that is exceeded."""
    quota = caller_of(scope).quota
    if quota is not None and _ENTITIES_CHARGED_KEY not in scope:
        if (shortage := quota.charge_entities(entity_count)) is not None:
            raise caller_of(scope).count_quota_refusal(shortage)
        scope[_ENTITIES_CHARGED_KEY] = True


class Callers:
    """Owners of all tokens in force. Immutable: a changed file creates a new object, and caches compare identity.

    The SHA-256 of a sent token is compared with that of every known token in constant time, so the duration reveals
    nothing about the known tokens.
    """

    def __init__(
        self, token_owners: Iterable[tuple[bytes, Caller]] = (), *, answers_without_token: bool = False
    ) -> None:
        """`token_owners`: pairs of a token's SHA-256 and its owner. `answers_without_token`: no token is needed."""
        self._digest_caller_pairs = tuple(token_owners)
        self._answers_without_token = answers_without_token

    @classmethod
    def of(
        cls,
        token: str,
        file_tokens: TokenEntries | None,
        quota_table: QuotaTable,
        request_counts_by_name: MutableMapping[str, CallerCounts],
        *,
        clock: Callable[[], float] = time.time,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> "Callers":
        """Build the owners of the one `token` ("": none) and of the file's tokens (None: no file).

        Counts are kept in `request_counts_by_name`.
        """
        token_owners: list[tuple[bytes, Caller]] = []
        if token:
            default_caller = Caller(
                DEFAULT_CALLER_NAME,
                MEANING_BY_SCOPE,
                request_counts_by_name.setdefault(DEFAULT_CALLER_NAME, CallerCounts()),
            )
            token_owners += [(digest, default_caller) for digest in token_digests(token)]
        for token_name, token_entry in (file_tokens or {}).items():
            quota = (
                Quota(row_key(token_name), token_entry.limits, quota_table, monotonic_clock)
                if token_entry.limits
                else None
            )
            request_counts = request_counts_by_name.setdefault(token_name, CallerCounts())
            caller = Caller(token_name, token_entry.scopes, request_counts, token_entry.expires_at_s, quota, clock)
            token_owners.append((bytes.fromhex(token_entry.sha256), caller))
        return cls(token_owners, answers_without_token=not token and file_tokens is None)

    def identify_and_count(self, scope: MutableMapping[str, Any]) -> None:
        """Store the caller in the request's scope unless it is there already, and count the request."""
        if CALLER_KEY not in scope:
            scope[CALLER_KEY] = self.identify(scope["headers"])
        scope[CALLER_KEY].counts.request_count += 1

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Return the owner of the first token in these headers (names in lower case); STRANGER without one."""
        if self._answers_without_token:
            return ANYBODY
        for header_name, header_value in headers:
            if header_name == b"authorization":
                return self._find_token_owner(header_value)
        return STRANGER

    def _find_token_owner(self, authorization_header: bytes) -> Caller:
        digest = hashlib.sha256(authorization_header[len(_BEARER_PREFIX) :][:TOKEN_BYTES_MAX]).digest()
        owner = STRANGER
        for known_digest, caller in self._digest_caller_pairs:  # no early exit: a constant duration
            if hmac.compare_digest(digest, known_digest):
                owner = caller
        # The scheme's name is case-insensitive (RFC 9110, 11.1), the token is not.
        is_bearer = authorization_header[: len(_BEARER_PREFIX)].lower() == _BEARER_PREFIX
        is_token = is_bearer and len(authorization_header) <= len(_BEARER_PREFIX) + TOKEN_BYTES_MAX
        return owner if is_token else STRANGER


def token_digests(token: str) -> tuple[bytes, ...]:
    """Return the SHA-256 of a token in each encoding that clients use: two (UTF-8, Latin-1) for non-ASCII tokens."""
    encoded_tokens = {token.encode()}
    with contextlib.suppress(UnicodeEncodeError):
        encoded_tokens.add(token.encode("latin-1"))
    return tuple(sorted(hashlib.sha256(encoded_token).digest() for encoded_token in encoded_tokens))


class TokenWatch(Collector):
    """Tokens in force, from the settings and a file ("": none); an unreadable file leaves its last version in force."""

    def __init__(
        self,
        token: str,
        tokens_path: str,
        quota_table: QuotaTable,
        *,
        clock: Callable[[], float] = time.time,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file; raise ConfigError if that fails or the content is invalid."""
        self._token, self._tokens_path = token, Path(tokens_path) if tokens_path else None
        self._quota_table, self._clock, self._monotonic_clock = quota_table, clock, monotonic_clock
        self._counts_by_name: dict[str, CallerCounts] = {}
        self._loaded_version = self._tokens_file_version()
        self.stale_error: str | None = None
        """Why the changed file is not applied; None: the newest version is in force."""
        self.callers = self._build_callers(None if self._tokens_path is None else read_tokens(self._tokens_path))

    @property
    def is_stale(self) -> bool:
        """True while the file cannot be used and older tokens stay in force."""
        return self.stale_error is not None

    @contextlib.asynccontextmanager
    async def follow_file(
        self, loops: BackgroundLoops, on_callers_change: Callable[[Callers], None]
    ) -> AsyncIterator[None]:
        """Check the file at regular intervals while the context is open; call `on_callers_change` with new callers."""
        if self._tokens_path is None:
            yield
            return
        # A thread of its own: a mount that hangs must not block the event loop, and other work must not delay a
        # revocation.
        executor = ThreadPoolExecutor(1, "larder-tokens")

        async def reload_if_changed() -> None:
            version_and_tokens = await asyncio.get_running_loop().run_in_executor(executor, self._read_if_changed)
            if version_and_tokens is not None and self._put_tokens_in_force(*version_and_tokens):
                on_callers_change(self.callers)

        check_task = loops.start("tokens", reload_if_changed, wait=lambda: asyncio.sleep(TOKENS_CHECK_INTERVAL_S))
        try:
            yield
        finally:
            await cancel_and_wait([check_task])
            executor.shutdown(wait=False, cancel_futures=True)

    def reload_if_changed(self) -> bool:
        """Read the file again if it changed; return whether the callers changed."""
        version_and_tokens = self._read_if_changed()
        return version_and_tokens is not None and self._put_tokens_in_force(*version_and_tokens)

    def _read_if_changed(self) -> tuple[FileVersion, TokenEntries | ConfigError] | None:
        """Return a changed file's version with its tokens or error, None if unchanged; changes no state.

        An unreadable file is read again at each check: a changed permission of a parent folder does not change the
        file's version.
        """
        if self._tokens_path is None:
            return None
        if (version := self._tokens_file_version()) == self._loaded_version and not self.is_stale:
            return None
        try:
            return version, read_tokens(self._tokens_path)
        except ConfigError as error:
            return version, error

    def _put_tokens_in_force(
        self, tokens_file_version: FileVersion, tokens_or_error: TokenEntries | ConfigError
    ) -> bool:
        if isinstance(tokens_or_error, ConfigError):
            if not (self.is_stale and tokens_file_version == self._loaded_version):
                log.error(
                    "the tokens file is not applied, the previous tokens stay in force: %s", tokens_or_error.message
                )
            self.stale_error, self._loaded_version = tokens_or_error.message, tokens_file_version
            return False
        self.callers = self._build_callers(tokens_or_error)
        # Set last: if an error prevents this, the file is read again at the next check.
        self.stale_error, self._loaded_version = None, tokens_file_version
        log.info("%d tokens of %s are in force", len(tokens_or_error), self._tokens_path)
        return True

    def collect(self) -> Iterable[Metric]:
        """Yield counters by token name, and whether the newest file is in force."""
        request_family = CounterMetricFamily(
            "larder_token_requests", "Requests by the name of their token, including refused ones", labels=["token"]
        )
        refusal_family = CounterMetricFamily(
            "larder_token_refusals", "Requests refused by expiry, scope or quota", labels=["token", "reason"]
        )
        for token_name, request_counts in self._counts_by_name.items():
            request_family.add_metric([token_name], request_counts.request_count)
            for reason, refusal_count in request_counts.refusals_by_reason.items():
                refusal_family.add_metric([token_name, reason], refusal_count)
        yield request_family
        yield refusal_family
        yield GaugeMetricFamily(
            "larder_tokens_stale", "1 while the tokens file cannot be read and older tokens stay in force",
            value=float(self.is_stale),
        )  # fmt: skip

    def _build_callers(self, file_tokens: TokenEntries | None) -> Callers:
        for removed_name in self._counts_by_name.keys() - {DEFAULT_CALLER_NAME} - set(file_tokens or {}):
            del self._counts_by_name[removed_name]  # keep no series for names that are no longer in the file
        return Callers.of(
            self._token,
            file_tokens,
            self._quota_table,
            self._counts_by_name,
            clock=self._clock,
            monotonic_clock=self._monotonic_clock,
        )

    def _tokens_file_version(self) -> FileVersion:
        return None if self._tokens_path is None else file_version(self._tokens_path)
