"""The demo itself: two nights through Airflow, traffic over HTTP, a swap and a rollback under it, all checked."""

import asyncio
import gc
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cache.process.redis_server import redis_url
from cache.store.artefacts import ArtefactStore
from cache.store.releases import all_releases
from infra.demo import dataset as datasets
from infra.demo.checks import Judge, Question
from infra.demo.dataset import Dataset
from infra.demo.evaluate import TOP, offline_lists, quality, served_lists
from infra.demo.place import SCORERS, DemoFolder, place
from infra.demo.scrape import ServiceCounts, scrape
from infra.demo.steps import Step, Steps
from infra.demo.summary import Findings, invite, summarize
from infra.demo.synthetic import World
from infra.demo.traffic import Background, Stream, replay
from infra.local.airflow import LocalAirflow
from infra.local.airflow_client import RunReport
from infra.local.service import ServiceProcess
from serving.client import Client, Unanswered

NIGHTLY = "nightly_precompute"
RUN_TIMEOUT_S = 900.0
FOLLOW_S = 10.0
RATE = 600.0
"""Requests per second of the measured replay: below what one worker can do, so that no time is spent queueing."""


class Broken(RuntimeError):
    """An invariant does not hold; the message says which."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run: what to run, and how much of it."""

    data: Path | None
    state: Path
    quick: bool
    serve: bool

    @property
    def requests(self) -> int:
        """Requests of the measured replay."""
        return 3_000 if self.quick else 10_000

    @property
    def world(self) -> World:
        """The synthetic data set."""
        today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self.quick:
            return World(users=3_000, items=1_000, until=today)
        return World(until=today)

    def dataset(self) -> Dataset:
        """The user's, else the synthetic one."""
        if self.data is None:
            return datasets.synthetic(self.world)
        return datasets.user_data(self.data, now=datetime.now(UTC))


class Demo:
    """Run of the demo; everything it starts is gone when `run` returns or raises."""

    def __init__(self, plan: Plan, steps: Steps) -> None:
        self.plan = plan
        self.steps = steps
        self.judge = Judge()
        self.found = Findings()

    def run(self) -> None:
        """Raises Broken, AirflowFailed, ServiceFailed or LarderError with a clear line."""
        with ExitStack() as stack:
            here = stack.enter_context(place(self.plan.state))
            data = self._data(here)
            redis = self._redis(stack, here)
            environment = here.environment(redis)
            with self.steps.step("Airflow: API server, scheduler, DAG processor") as step:
                airflow = stack.enter_context(
                    LocalAirflow(here.home, environment=environment, pools={"gpu": SCORERS})
                )
                step.note(airflow.url)
            self._first_night(airflow)
            with self.steps.step("Lookup service") as step:
                service = stack.enter_context(
                    ServiceProcess(here.home / "service.log", environment)
                )
                self.found.first = self._live(service)
                step.note(f"{service.url}, generation {self.found.first}")
            stream = Stream(data)
            self._replay(service, stream)
            self._evaluate(service, here, data)
            self._second_night(airflow, service, stream, here, data)
            counts = self._audit(service, here)
            summarize(self.steps, self.found, data.name, counts, self.judge.requests)
            if self.plan.serve:
                self._serve(service, airflow, here, data)

    def _data(self, here: DemoFolder) -> Dataset:
        with self.steps.step("Data") as step:
            data = self.plan.dataset()
            data.write_first(here.home / "data")
            here.write_config(data)
            self.judge.histories = data.histories
            # A full collection over the data would stop the clock that measures the service.
            gc.collect()
            gc.freeze()
            step.note(
                f"{data.name}: {len(data.histories):,} users, {len(data.known):,} interactions, "
                f"{len(data.held_out):,} users with something held out, {len(data.newcomers)} newcomers"
            )
        return data

    def _redis(self, stack: ExitStack, here: DemoFolder) -> str:
        with self.steps.step("Redis") as step:
            configured = os.environ.get("REDIS_URL") or None
            url = stack.enter_context(redis_url(here.home, configured))
            if configured:
                stack.callback(here.forget, url)
            step.note("the configured one" if configured else url)
        return url

    def _first_night(self, airflow: LocalAirflow) -> None:
        before = airflow.run_ids(NIGHTLY)
        with self.steps.step("DAG train_reference: the model bundle") as step:
            self._wait(airflow, "train_reference", airflow.trigger("train_reference"), step)
        with self.steps.step(f"DAG {NIGHTLY}: started by the new bundle") as step:
            run = airflow.wait_new(NIGHTLY, before)
            self._wait(airflow, NIGHTLY, run, step)

    def _wait(self, airflow: LocalAirflow, dag: str, run: str, step: Step) -> RunReport:
        step.bar("tasks", None)

        def tell(task: Any) -> None:
            step.advance(1)
            step.say(f"{task.task_id} {task.duration_s:.1f} s")

        report = airflow.wait(dag, run, RUN_TIMEOUT_S, on_task=tell)
        slowest = sorted(report.tasks, key=lambda task: task.duration_s, reverse=True)[:3]
        longest = ", ".join(f"{task.task_id} {task.duration_s:.1f} s" for task in slowest)
        step.note(f"{len(report.tasks)} task{'s' * (len(report.tasks) > 1)}, longest {longest}")
        return report

    def _live(self, service: ServiceProcess) -> str:
        try:
            with Client(service.url) as larder:
                return larder.generations().live.generation
        except Unanswered as error:
            raise Broken(f"the service does not say what is live: {error}") from error

    def _follow(
        self, service: ServiceProcess, wanted: str | None = None, *, unlike: str | None = None
    ) -> str:
        """Wait until the service answers from `wanted` (or from any but `unlike`)."""
        give_up = time.monotonic() + FOLLOW_S
        while time.monotonic() < give_up:
            service.check()
            live = self._live(service)
            if live == wanted or (wanted is None and live != unlike):
                return live
            time.sleep(0.05)
        raise Broken(
            f"the service still answers from {live} {FOLLOW_S:.0f} s after the pointer moved"
        )

    def _replay(self, service: ServiceProcess, stream: Stream) -> None:
        with self.steps.step(f"Replay {self.plan.requests:,} requests") as step:
            step.bar("requests", self.plan.requests)
            began = time.perf_counter()
            work = replay(
                service.url,
                stream,
                self.judge,
                requests=self.plan.requests,
                concurrency=8,
                rate=RATE,
                progress=step.advance,
            )
            self.found.quiet = asyncio.run(work)
            rate = self.plan.requests / (time.perf_counter() - began)
            step.note(
                f"{rate:,.0f} requests/s over 8 connections, client and server on this machine"
            )
            self._stop_if_broken()

    def _evaluate(self, service: ServiceProcess, here: DemoFolder, data: Dataset) -> None:
        users = [user for user, items in data.held_out.items() if items]
        if not users:
            return

        def judged(answers: Sequence[Mapping[str, Any]]) -> None:
            asked = [Question("user_topk", str(each["id"]), TOP) for each in answers]
            self.judge.request(asked, answers)

        with self.steps.step(f"Recall and NDCG at {TOP}, read through HTTP") as step:
            try:
                found = asyncio.run(served_lists(service.url, users, judged))
            except Unanswered as error:
                raise Broken(f"a batch of users has no answer: {error}") from error
            served = self.found.served = quality(found.lists, data.held_out)
            step.note(f"{served.users:,} users: recall {served.recall:.6f}, NDCG {served.ndcg:.6f}")
            if found.asked_again:
                step.note(f"{found.asked_again} asked again after a deadline")
        with self.steps.step("The same offline: plain numpy over the bundle") as step:
            step.bar("users", len(users))
            exact = offline_lists(here.home / "bundle", data.histories, users, step.advance)
            offline = self.found.offline = quality(exact, data.held_out)
            step.note(f"recall {offline.recall:.6f}, NDCG {offline.ndcg:.6f}")
            if not served.agrees_with(offline):
                raise Broken(f"served quality {served} is not the bundle's own {offline}")
            self._stop_if_broken()

    def _second_night(
        self,
        airflow: LocalAirflow,
        service: ServiceProcess,
        stream: Stream,
        here: DemoFolder,
        data: Dataset,
    ) -> None:
        found = self.found
        data.write_second(here.home / "data")
        with Background(service.url, stream, self.judge, rate=150.0) as traffic:
            with self.steps.step(f"DAG {NIGHTLY}: a day later, under traffic") as step:
                run = airflow.trigger(NIGHTLY, {"data_until": data.second_cut.isoformat()})
                self._wait(airflow, NIGHTLY, run, step)
                found.second = self._follow(service, unlike=found.first)
                step.note(f"generation {found.second}")
            with self.steps.step("DAG roll_back, under traffic") as step:
                run = airflow.trigger("roll_back", {"reason": "the demo takes it back"})
                airflow.wait("roll_back", run, RUN_TIMEOUT_S)
                self._follow(service, found.first)
                # Whoever asks from now on must not hear of it again.
                self.judge.barred.add(found.second)
                step.note(f"{found.first} is live again")
            with self.steps.step("Traffic goes on, none of it from what was rolled back"):
                time.sleep(3.0)
                service.check()
        found.busy = traffic.latencies
        self._stop_if_broken()
        if not self.judge.generations[found.second]:
            raise Broken(f"{found.second} was live and never answered")

    def _audit(self, service: ServiceProcess, here: DemoFolder) -> ServiceCounts:
        with self.steps.step("Audit: every answer against the service's own counters") as step:
            counts = asyncio.run(scrape(service.url))
            for line in counts.disagreements(self.judge.sources, self.judge.entities):
                self.judge.complain(line)
            moves = [
                each
                for each in all_releases(ArtefactStore(str(here.artifacts / here.namespace)))
                if each.done
            ]
            self.judge.published({each.generation for each in moves})
            self._stop_if_broken()
            step.note(
                f"{self.judge.requests:,} requests, {self.judge.entities:,} entities, 0 violations"
            )
        return counts

    def _stop_if_broken(self) -> None:
        if self.judge.broken:
            few = "\n  ".join(self.judge.violations[:5])
            raise Broken(f"{self.judge.broken} violations, the first of them:\n  {few}")

    def _serve(
        self, service: ServiceProcess, airflow: LocalAirflow, here: DemoFolder, data: Dataset
    ) -> None:
        invite(self.steps.console, service.url, airflow.url, here.home, data)
        try:
            while True:
                time.sleep(1.0)
                service.check()
        except KeyboardInterrupt:  # how it is meant to end
            self.steps.console.print("\nstopped serving")
