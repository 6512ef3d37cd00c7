"""The judging of answers put together, for as long as the service runs."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from cache.control.hot_keys import COLD_WINDOW
from cache.l2.control_plane import ControlPlane
from cache.process.background_loops import BackgroundLoops, stop
from cache.tiers.l1 import LocalTier
from serving.admission.controller import Admission
from serving.config.cpu_affinity import LAST, step_back
from serving.config.settings import ServingConfig
from serving.generations.holder import GenerationHolder
from serving.generations.redis_clock import RedisClock
from serving.lookup.micro_batcher import MicroBatcher
from serving.metrics.registry import Metrics
from serving.quality.judge import AnswerJudge
from serving.quality.night_inputs import open_inputs
from serving.quality.results import QualityResults
from serving.quality.shared_report import SharedReport
from serving.usage.hot_keys import HotKeySketch, RecentNames
from serving.usage.request_observer import UsageObserver
from serving.usage.table_usage import TableUsage

Step = Callable[[], Coroutine[Any, Any, None]]


class QualityMonitor:
    """Quality monitor; `to_json` is for the dashboard, `steps` are taken periodically by who keeps up with Redis."""

    def __init__(
        self,
        config: ServingConfig,
        watch: UsageObserver,
        metrics: Metrics,
        local: LocalTier,
        control: ControlPlane,
        holder: GenerationHolder,
        recent: RecentNames,
        batcher: MicroBatcher,
        admission: Admission,
        clock: RedisClock,
        name: str,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self._loops = BackgroundLoops() if loops is None else loops

        def live() -> Any:
            return holder.live

        self.cold = HotKeySketch(control, watch.cold, live, clock, COLD_WINDOW)
        self._results = QualityResults()
        self._usage = TableUsage(control, watch.reads, metrics, recent.names, live)
        self._shared_report = SharedReport(
            control, name, self._results, self._usage, live, clock, config.quality_s
        )
        self._executor = ThreadPoolExecutor(
            1, "larder-quality", initializer=step_back, initargs=(LAST,)
        )
        self._judge = AnswerJudge(
            watch.sampler,
            self._results,
            local,
            live=live,
            find_snapshot=holder.find_snapshot,
            open_inputs=partial(open_inputs, config.store()),
            is_busy=lambda: batcher.queued > 0 or admission.is_behind or admission.live_share < 1,
            executor=self._executor,
            cpu_share=config.quality_cpu_share,
            threads=config.live_threads,
        )
        self._is_sampling = config.sampled_per_mille > 0
        self._running: asyncio.Task[None] | None = None
        self._watch = watch
        self._every_s = config.quality_s
        for collector in (self._results, self._usage):
            metrics.registry.register(collector)
        self.to_json = self._shared_report.to_json

    def steps(self) -> list[tuple[str, float, Step]]:
        """Periodic steps: the name of the loop, the seconds between two runs (0: none), and what is run."""
        return [
            ("quality_report", self._every_s, self._shared_report.report),
            ("cold_ids", self._every_s, self.cold.report),
        ]

    def internal_counters(self) -> dict[str, float]:
        """Event counts by name."""
        return {
            "cold_reported": self.cold.reported,
            "cold_reports_failed": self.cold.failed,
            "reads_left_out": self._watch.reads.left_out,
        }

    def start(self) -> None:
        """Starts sampling, unless the share of sampled answers is 0."""
        if self._is_sampling:
            self._running = self._loops.start("quality_samples", self._judge.judge_next)

    async def aclose(self) -> None:
        """Stops sampling, and takes this replica's part of the shared report back."""
        await stop([self._running])
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._every_s:
            await self._shared_report.sign_off()
