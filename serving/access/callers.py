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
from serving.access.token_file import DEFAULT_NAME, SCOPES, Scope, Tokens, read_tokens
from serving.requests.context import CALLER_KEY
from serving.requests.errors import Problem

log = logging.getLogger(__name__)

TOKENS_LOOK_S = 0.5
"""Seconds between checks of the tokens file."""

TOKEN_BYTES_MAX = 4_096
"""Bytes of a token; a longer one is never valid."""

_BEARER = b"bearer "

_SPENT_KEY = "larder.spent"

REFUSAL_REASONS = ("expired", "scope_missing", "requests_per_s", "entities_per_s", "in_flight")
"""Reasons for which a request with a known token is refused."""

FileVersion = tuple[int, int, int] | None


class CallerCounts:
    """Counts of one token's requests, and of the refused ones by reason; kept while its name is in the file."""

    __slots__ = ("refused", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.refused = dict.fromkeys(REFUSAL_REASONS, 0)


class Caller:
    """Owner of a token: its name, scopes, expiry (Unix seconds) and quota, never the token itself."""

    __slots__ = ("_clock", "counts", "expires_at", "is_bounded", "name", "quota", "scopes")

    def __init__(
        self,
        name: str,
        scopes: Iterable[str],
        request_counts: CallerCounts,
        expires_at: float = float("inf"),
        quota: Quota | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.scopes, self.counts = name, frozenset(scopes), request_counts
        self.expires_at, self.quota = expires_at, quota
        self.is_bounded = quota is not None or expires_at != float("inf")
        self._clock = clock

    @property
    def is_expired(self) -> bool:
        """True once the token has expired."""
        return self.expires_at != float("inf") and self._clock() >= self.expires_at

    @property
    def is_known(self) -> bool:
        """True if the caller has any scope and is not expired, so that a body may be read."""
        return bool(self.scopes) and not self.is_expired

    def may(self, scope: Scope) -> bool:
        """True if a request that needs this scope may be answered."""
        return scope in self.scopes and not self.is_expired

    def demand(self, scope: Scope) -> None:
        """Raise Problem (401, 403), and count it, unless a request that needs this scope may be answered."""
        if not self.scopes:
            raise Problem(401, "unauthorized", "send Authorization: Bearer <token>")
        if self.is_expired:
            self.counts.refused["expired"] += 1
            raise Problem(401, "token_expired", "this token has expired: ask for another one")
        if scope not in self.scopes:
            self.counts.refused["scope_missing"] += 1
            raise Problem(
                403, "scope_missing", f"this needs a token with the scope {scope}", scope=scope,
                scopes=sorted(self.scopes),
            )  # fmt: skip

    def refused(self, short: Shortage) -> Problem:
        """Return the refusal of a request that exceeds the quota, and count it."""
        self.counts.refused[short.kind] += 1
        return quota_exceeded(short)


ANYBODY = Caller("", SCOPES, CallerCounts())
"""Caller of a service without tokens."""

STRANGER = Caller("", (), CallerCounts())
"""Caller without a token, or with an unknown one."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Return the caller identified where the request was accepted; STRANGER without one."""
    caller: Caller = scope.get(CALLER_KEY, STRANGER)
    return caller


def enter_quota(
    scope: MutableMapping[str, Any], *, is_of_one: bool
) -> AbstractContextManager[object]:
    """Charge a request, and its entity if `is_of_one`, to its caller's quota; raise Problem (429) if it is used up.

    The request is in flight until the context ends.
    """
    caller = caller_of(scope)
    quota = caller.quota
    if quota is None or caller.is_expired:
        return contextlib.nullcontext()
    if (short := quota.enter(int(is_of_one))) is not None:
        raise caller.refused(short)
    if is_of_one:
        scope[_SPENT_KEY] = True
    return contextlib.closing(quota)


def spend_quota(scope: MutableMapping[str, Any], entities: int) -> None:
    """Charge a request's entities to its caller's quota, once per request; raise Problem (429) if that is used up."""
    quota = caller_of(scope).quota
    if quota is not None and _SPENT_KEY not in scope:
        if (short := quota.spend(entities)) is not None:
            raise caller_of(scope).refused(short)
        scope[_SPENT_KEY] = True


class Callers:
    """Owners of all tokens in force. Immutable: a changed file creates a new object, and caches compare identity.

    Each token is judged by its SHA-256, compared with that of every known token in constant time: how long that takes
    tells nothing of any of them, nor which was nearly met.
    """

    def __init__(
        self, token_owners: Iterable[tuple[bytes, Caller]] = (), *, is_open: bool = False
    ) -> None:
        """`token_owners`: pairs of a token's SHA-256 and its owner. `is_open`: the service answers without a token."""
        self._digest_caller_pairs = tuple(token_owners)
        self._is_open = is_open

    @classmethod
    def of(
        cls,
        token: str,
        tokens: Tokens | None,
        rows: QuotaTable,
        request_counts_by_name: MutableMapping[str, CallerCounts],
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> "Callers":
        """Build the owners of the one `token` ("": none) and of the file's tokens (None: no file).

        Counts are kept in `request_counts_by_name`.
        """
        token_owners: list[tuple[bytes, Caller]] = []
        if token:
            default = Caller(
                DEFAULT_NAME,
                SCOPES,
                request_counts_by_name.setdefault(DEFAULT_NAME, CallerCounts()),
            )
            token_owners += [(digest, default) for digest in token_digests(token)]
        for name, entry in (tokens or {}).items():
            quota = Quota(row_key(name), entry.limits, rows, timer) if entry.limits else None
            counts = request_counts_by_name.setdefault(name, CallerCounts())
            caller = Caller(name, entry.scopes, counts, entry.expires_s, quota, clock)
            token_owners.append((bytes.fromhex(entry.sha256), caller))
        return cls(token_owners, is_open=not token and tokens is None)

    def note(self, scope: MutableMapping[str, Any]) -> None:
        """Store the caller in the request's scope unless it is there already, and count the request."""
        if CALLER_KEY not in scope:
            scope[CALLER_KEY] = self.identify(scope["headers"])
        scope[CALLER_KEY].counts.requests += 1

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Return the owner of the first token in these headers (names in lower case); STRANGER without one."""
        if self._is_open:
            return ANYBODY
        for name, value in headers:
            if name == b"authorization":
                return self._judged(value)
        return STRANGER

    def _judged(self, authorization: bytes) -> Caller:
        digest = hashlib.sha256(authorization[len(_BEARER) :][:TOKEN_BYTES_MAX]).digest()
        owner = STRANGER
        for known_digest, caller in self._digest_caller_pairs:  # all of them, whichever fits
            if hmac.compare_digest(digest, known_digest):
                owner = caller
        # The scheme's name is compared without its case (RFC 9110, 11.1), the token as it is.
        is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
        is_token = is_bearer and len(authorization) <= len(_BEARER) + TOKEN_BYTES_MAX
        return owner if is_token else STRANGER


def token_digests(token: str) -> tuple[bytes, ...]:
    """Return the SHA-256 of a token in each encoding that clients use; only one beyond ASCII has two."""
    forms = {token.encode()}
    with contextlib.suppress(UnicodeEncodeError):
        forms.add(token.encode("latin-1"))
    return tuple(sorted(hashlib.sha256(form).digest() for form in forms))


class TokenWatch(Collector):
    """Tokens in force, from the settings and a file ("": none); an unreadable file leaves its last version in force."""

    def __init__(
        self,
        token: str,
        file: str,
        rows: QuotaTable,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file; raise ConfigError if that fails or the content is invalid."""
        self._token, self._path = token, Path(file) if file else None
        self._rows, self._clock, self._timer = rows, clock, timer
        self._counts_by_name: dict[str, CallerCounts] = {}
        self._loaded_version = self._version()
        self.is_stale = False
        self.callers = self._build_callers(None if self._path is None else read_tokens(self._path))

    @contextlib.asynccontextmanager
    async def followed(
        self, loops: BackgroundLoops, on_change: Callable[[Callers], None]
    ) -> AsyncIterator[None]:
        """Check the file every TOKENS_LOOK_S while the context is open; call `on_change` with new callers."""
        if self._path is None:
            yield
            return
        # One thread for this alone: neither a mount that hangs nor a flood of other work may put a revocation off, nor
        # hold up the event loop.
        executor = ThreadPoolExecutor(1, "larder-tokens")

        async def keep_up() -> None:
            version_and_tokens = await asyncio.get_running_loop().run_in_executor(
                executor, self._read
            )
            if version_and_tokens is not None and self._apply(*version_and_tokens):
                on_change(self.callers)

        task = loops.start("tokens", keep_up, wait=lambda: asyncio.sleep(TOKENS_LOOK_S))
        try:
            yield
        finally:
            await cancel_and_wait([task])
            executor.shutdown(wait=False, cancel_futures=True)

    def reload_if_changed(self) -> bool:
        """Read the file again if it changed; return whether the callers changed."""
        version_and_tokens = self._read()
        return version_and_tokens is not None and self._apply(*version_and_tokens)

    def _read(self) -> tuple[FileVersion, Tokens | ConfigError] | None:
        """Return a changed file's version with its tokens or error, None if unchanged; changes no state."""
        if self._path is None or (version := self._version()) == self._loaded_version:
            return None
        try:
            return version, read_tokens(self._path)
        except ConfigError as error:
            return version, error

    def _apply(self, version: FileVersion, tokens: Tokens | ConfigError) -> bool:
        self.is_stale = isinstance(tokens, ConfigError)
        if isinstance(tokens, ConfigError):
            log.error("the tokens in force stay as they were: %s", tokens.message)
            self._loaded_version = version
            return False
        self.callers = self._build_callers(tokens)
        self._loaded_version = (
            version  # last of all: what was not put in force is read again at the next look
        )
        log.info("%d tokens of %s are in force", len(tokens), self._path)
        return True

    def collect(self) -> Iterable[Metric]:
        """Yield counters by token name, and whether the newest file is in force."""
        requests = CounterMetricFamily(
            "larder_token_requests",
            "Requests by the name of their token, refused ones too",
            labels=["token"],
        )
        refused = CounterMetricFamily(
            "larder_token_refusals",
            "Requests refused by expiry, scope or quota",
            labels=["token", "reason"],
        )
        for name, request_counts in self._counts_by_name.items():
            requests.add_metric([name], request_counts.requests)
            for reason, count in request_counts.refused.items():
                refused.add_metric([name, reason], count)
        yield requests
        yield refused
        yield GaugeMetricFamily(
            "larder_tokens_stale", "1 while the tokens file cannot be read and older tokens stay in force",
            value=float(self.is_stale),
        )  # fmt: skip

    def _build_callers(self, tokens: Tokens | None) -> Callers:
        for name in self._counts_by_name.keys() - {DEFAULT_NAME} - set(tokens or {}):
            del self._counts_by_name[name]  # names that come and go must not fill metrics
        return Callers.of(
            self._token,
            tokens,
            self._rows,
            self._counts_by_name,
            clock=self._clock,
            timer=self._timer,
        )

    def _version(self) -> FileVersion:
        return None if self._path is None else file_version(self._path)
