"""Tokens in force: read where the service starts, and again within a second of each change of their file."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.errors import ConfigError
from cache.process.background_loops import BackgroundLoops, stop
from cache.store.local_files import file_version
from serving.access.callers import CallerCounts, Callers
from serving.access.quota import QuotaRows
from serving.access.token_file import DEFAULT, Tokens, read_tokens

LOOK_S = 0.5
"""Seconds between looks at the file."""

log = logging.getLogger(__name__)

FileVersion = tuple[int, int, int] | None


class TokenWatch(Collector):
    """The one token of the settings and those of a file ("": none); a file that cannot be read leaves the last one."""

    def __init__(
        self,
        token: str,
        file: str,
        rows: QuotaRows,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the file; raises ConfigError if that cannot be done, or if it holds anything wrong."""
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
        """Look at the file every LOOK_S for as long as the context is open, and pass on other callers."""
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

        task = loops.start("tokens", keep_up, wait=lambda: asyncio.sleep(LOOK_S))
        try:
            yield
        finally:
            await stop([task])
            executor.shutdown(wait=False, cancel_futures=True)

    def reload_if_changed(self) -> bool:
        """Reads the file again if it is another one; returns whether other callers are in force now."""
        version_and_tokens = self._read()
        return version_and_tokens is not None and self._apply(*version_and_tokens)

    def _read(self) -> tuple[FileVersion, Tokens | ConfigError] | None:
        """A file that is another one than before, or what is wrong with it; changes nothing here."""
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
        """Counter families by token name, and whether the newest file is in force; names are those of the file."""
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
        for name in self._counts_by_name.keys() - {DEFAULT} - set(tokens or {}):
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
