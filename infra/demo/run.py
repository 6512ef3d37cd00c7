"""The demo itself: two nights through Airflow, traffic, a click, a swap and a rollback under it, all checked."""

import asyncio
import gc
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from cache.errors import ConfigError
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.process.host import usable_cores
from cache.process.redis_server import redis_url
from cache.store.artefacts import ArtefactStore, read_manifest
from cache.store.releases import all_releases
from infra.demo.checks import InvariantViolation, Judge, Question, translate_errors
from infra.demo.console import Findings, Step, Steps, invite, summarize
from infra.demo.dataset import Dataset, Plan
from infra.demo.evaluate import TOP, answer_to_json, offline_lists, quality, served_lists
from infra.demo.features import add_features, ask_cold, describe_features
from infra.demo.http import ServiceCounts, get, scrape
from infra.demo.traffic import Background, Stream, replay
from infra.local.airflow import MANUAL_SCHEDULE, LocalAirflow, RunReport, hold_lock
from infra.local.service import ServiceProcess
from precompute.bulk.load import unlink_pages
from precompute.config.settings import night_config
from precompute.events.stores import connect_events
from serving.client import Answer, Client, EventReceipt, NewEvent, Options, Policy, Unanswered

TABLE = "user_topk"
ITEMS_SHOWN = 4
DEADLINE_MS = 5_000
COUNTED_WITHIN_S = 10.0

SHOWN_WITHIN_S = 3.0
"""Seconds that the dashboard may lag behind answers: its document is made again each second, its counts each two."""

FOLLOW_S = 10.0
NIGHT_DAG = "nightly_precompute"
BUNDLE_ASSET = "larder_bundle"
RUN_TIMEOUT_S = 900.0
SHARDS = 4

SCORERS = 2
"""Scoring tasks at a time, the slots of the pool: together they fill the machine."""

REPLAY_RATE = 600.0
"""Requests per second of the measured replay: below what one worker can do, so that no time is spent queueing."""

_SUBFOLDERS = (
    "data",
    "artifacts",
    "bundle",
    "bundle-with-features",
    "host-cache",
    "larder.toml",
    "service.log",
)


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """Paths under `home`, and the namespace that keeps this run apart from others in the same Redis."""

    home: Path
    namespace: str

    @property
    def config(self) -> Path:
        """The settings of nights and service."""
        return self.home / "larder.toml"

    @property
    def bundle(self) -> Path:
        """The model that nights score with."""
        return self.home / "bundle"

    @property
    def artifacts(self) -> Path:
        """The artefact store."""
        return self.home / "artifacts"

    def write_config(self, dataset: Dataset) -> None:
        """Write the settings that differ from the defaults."""
        lines = [
            f'namespace = "{self.namespace}"',
            'artifacts = "artifacts"',
            'bundle = "bundle"',
            'state = "."',
            f'data_until = "{dataset.first_cut.isoformat()}"',
            f"shards = {SHARDS}",
            f"threads = {max(1, usable_cores() // SCORERS)}",
            "",
            "[sources]",
            'interactions = ["data/interactions"]',
        ]
        lines += [f'{name} = "data/{file}"' for name, file in dataset.feature_tables.items()]
        lines += ["", "[events]", "enabled = true"]
        self.config.write_text("\n".join(lines) + "\n")

    def environment(
        self, redis_url: str, environ: Mapping[str, str] = os.environ
    ) -> dict[str, str]:
        """Environment of nights and service; settings of the surrounding shell do not reach them."""
        blank = {name: "" for name in environ if name.startswith("LARDER_")}
        return {
            **blank,
            "LARDER_CONFIG": str(self.config),
            "LARDER_NAMESPACE": self.namespace,
            "LARDER_ARTIFACTS": str(self.artifacts),
            "LARDER_STATE": str(self.home),
            "LARDER_SCHEDULE": MANUAL_SCHEDULE,
            "LARDER_EVENTS_URL": environ.get("LARDER_EVENTS_URL", ""),
            "REDIS_URL": redis_url,
        }

    def forget(self, redis_url: str) -> None:
        """Remove this run's keys from a Redis that is not the demo's own."""
        config = night_config(str(self.config), self.environment(redis_url))
        keys = Keyspace(self.namespace)
        with connect(redis_url, config.redis_timeout_s) as client:
            for generation in config.store().names("generations"):
                unlink_pages(client, keys, read_manifest(config.store(), generation))
            client.unlink(keys.live, keys.generations, keys.replicas)
        with connect_events(config) as client:  # ids of events go by themselves, within `keep_s`
            client.unlink(keys.events, keys.inbox, keys.rejected_events)


@contextmanager
def prepare_demo_folder(state: Path) -> Iterator[DemoFolder]:
    """Empty the demo's folder and lock it during the block; raise ConfigError if another run uses it."""
    home = state.resolve() / "demo"
    home.mkdir(parents=True, exist_ok=True)
    lock_error = ConfigError(f"another demo runs in {home}; choose another --state")
    with hold_lock(home / "demo.lock", lock_error):
        for name in _SUBFOLDERS:
            path = home / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        yield DemoFolder(home, f"demo-{secrets.token_hex(4)}")


class Click:
    """Click of a user, followed from the event that is sent to the night that takes it over; every answer is judged.

    Nothing else changes for this user, so that the next list is the one that was answered live.

    Raises Unanswered, and ValueError with what does not hold. `judge`, which is for one thread at a time, hears of all
    answers when `judged` is called.
    """

    def __init__(self, url: str, data: Dataset, judge: Judge) -> None:
        arriving = set(data.arriving.users.to_pylist())
        users = [user for user in data.histories if user not in arriving]
        self.user = users[0] if users else next(iter(data.histories))
        self.item = ""
        self.counted_ms = 0.0
        self._is_alone = bool(users)
        self._url, self._judge = url, judge
        self._live: Answer | None = None
        self._unjudged_answers: list[tuple[Question, Mapping[str, Any]]] = []

    def send(self, step: Step) -> None:
        """Send the click, and note its effect."""
        with self._client() as larder:
            answer_before = self._look_up(larder)
            if not answer_before.items:
                raise ValueError(f"{self.user} has no list")
            self.item = answer_before.items[min(1, len(answer_before.items) - 1)]
            click = NewEvent("demo-click", user=self.user, item=self.item, type="click")
            receipt = larder.send_events([click])
            if receipt.accepted != 1:
                raise ValueError(f"the click was not accepted: {receipt}")
            after = self._live = self._until_counted(larder)
            stored_answer = self._look_up(larder, max_events=0)
        if stored_answer.items != answer_before.items or stored_answer.events:
            raise ValueError(f"max_events=0 is not the stored list: {stored_answer}")
        self.judged()
        step.note(f"{self.user} clicks on {self.item}: 202, {receipt.durability} kept")
        step.note(f"before  {_format_items(answer_before)}")
        step.note(f"after   {_format_items(after)}")
        step.note(
            f"events {after.events}, as of {after.as_of}, {self.counted_ms:.0f} ms after the 202"
        )
        step.note("max_events=0: the list as it was")
        step.note(self._dashboard(receipt))

    def taken_over(self, step: Step) -> None:
        """Hold the list of a night that took the click over against the one that was answered live."""
        with self._client() as larder:
            night_answer = self._look_up(larder)
        if night_answer.events or night_answer.producer != "batch":
            raise ValueError(
                f"the night did not take the click of {self.user} over: {night_answer}"
            )
        if self._is_to_be(night_answer):
            step.note(f"it has the click: the list of {self.user} is the one answered live")

    def counted_again(self, step: Step) -> None:
        """Hold the list after a roll back to a generation without the click against the one that was answered live."""
        with self._client() as larder:
            rollback_answer = self._until_counted(larder)
        if self._is_to_be(rollback_answer):
            step.note(f"which lacks the click: events {rollback_answer.events}, and the same list")

    def judged(self) -> None:
        """Has the judge hear of the answers since the last time."""
        for question, answer in self._unjudged_answers:
            self._judge.request([question], [answer])
        self._unjudged_answers.clear()

    def _is_to_be(self, later_answer: Answer) -> bool:
        """True if the list could be compared; raise ValueError if it differs from the one before."""
        live = self._live
        if live is None or not self._is_alone or live.approximate or later_answer.approximate:
            return False
        if later_answer.items != live.items:
            raise ValueError(
                f"{self.user} was answered {live.items}, and now is {later_answer.items}"
            )
        return True

    def _client(self) -> Client:
        # Sent once, so that what the service counted is what was asked.
        return Client(self._url, policy=Policy(attempts=1))

    def _look_up(self, larder: Client, max_events: int | None = None) -> Answer:
        options = Options(k=TOP, deadline_ms=DEADLINE_MS, max_events=max_events)
        (answer,) = larder.lookup_many(TABLE, [self.user], options)
        hidden = frozenset([self.item]) if answer.events else frozenset[str]()
        self._unjudged_answers.append(
            (Question(TABLE, self.user, TOP, hidden), answer_to_json(answer))
        )
        return answer

    def _until_counted(self, larder: Client) -> Answer:
        started_at = time.perf_counter()
        while time.perf_counter() < started_at + COUNTED_WITHIN_S:
            answer = self._look_up(larder)
            if answer.events:
                self.counted_ms = (time.perf_counter() - started_at) * 1000
                return answer
            time.sleep(0.005)
        raise ValueError(f"the click of {self.user} is not counted after {COUNTED_WITHIN_S:.0f} s")

    def _dashboard(self, receipt: EventReceipt) -> str:
        started_at = time.perf_counter()
        while True:
            # For somebody who has it open the document was made already, and may be a moment old.
            status, raw = asyncio.run(get(self._url, "/dashboard/data"))
            events = orjson.loads(raw).get("events") if status == 200 else None
            accepted = events["results"].get("accepted") if events else None
            if events and accepted and events["counted_until"] == receipt.position:
                return f"dashboard: {accepted} accepted, {events['lag_s'] or 0:.1f} s behind"
            if time.perf_counter() > started_at + SHOWN_WITHIN_S:
                raise ValueError(f"the dashboard does not show event {receipt.position}: {events}")
            time.sleep(0.1)


def _format_items(answer: Answer) -> str:
    return ", ".join((answer.items or ())[:ITEMS_SHOWN])


class Demo:
    """Run of the demo; everything it starts is gone when `run` returns or raises."""

    def __init__(self, plan: Plan, steps: Steps) -> None:
        self.plan = plan
        self.steps = steps
        self.judge = Judge()
        self.findings = Findings()

    def run(self) -> None:
        """Raises Broken, AirflowFailed, ServiceFailed or LarderError with a clear line."""
        with ExitStack() as stack:
            demo_folder = stack.enter_context(prepare_demo_folder(self.plan.state))
            data = self._data(demo_folder)
            redis = self._redis(stack, demo_folder)
            environment = demo_folder.environment(redis)
            with self.steps.step("Airflow: API server, scheduler, DAG processor") as step:
                airflow = stack.enter_context(
                    LocalAirflow(demo_folder.home, environment=environment, pools={"gpu": SCORERS})
                )
                step.note(airflow.url)
            self._first_night(airflow, demo_folder, data)
            with self.steps.step("Lookup service") as step:
                service = stack.enter_context(
                    ServiceProcess(demo_folder.home / "service.log", environment)
                )
                self.findings.first = self._live(service)
                step.note(f"{service.url}, generation {self.findings.first}")
            self._cold_start(service, data)
            stream = Stream(data)
            self._replay(service, stream)
            self._evaluate(service, demo_folder, data)
            click = self._click(service, data)
            self._second_night(airflow, service, stream, demo_folder, data, click)
            counts = self._audit(service, demo_folder)
            summarize(self.steps, self.findings, data.name, counts, self.judge.requests)
            self.steps.console.print("[green bold]every invariant held[/green bold]")
            if self.plan.serve:
                self._serve(service, airflow, demo_folder, data)

    def _data(self, demo_folder: DemoFolder) -> Dataset:
        with self.steps.step("Data") as step:
            data = self.plan.dataset()
            data.write_first(demo_folder.home / "data")
            demo_folder.write_config(data)
            self.judge.histories = data.histories
            # A full collection over the data would stop the clock that measures the service.
            gc.collect()
            gc.freeze()
            step.note(
                f"{data.name}: {len(data.histories):,} users, {len(data.initial_pairs):,} interactions"
            )
            step.note(
                f"{len(data.held_out):,} users with something held out, {len(data.newcomers)} newcomers"
            )
            if (profiles := data.profiles) is not None:
                step.note(f"features of {len(profiles.users):,} users: country, age")
                step.note(f"features of {len(profiles.items):,} items: category, price")
        return data

    def _redis(self, stack: ExitStack, demo_folder: DemoFolder) -> str:
        with self.steps.step("Redis") as step:
            configured = os.environ.get("REDIS_URL") or None
            url = stack.enter_context(redis_url(demo_folder.home, configured))
            if configured:
                stack.callback(demo_folder.forget, url)
            step.note(
                "the configured one" if configured else urlsplit(url).netloc.rpartition("@")[2]
            )
        return url

    def _first_night(self, airflow: LocalAirflow, demo_folder: DemoFolder, data: Dataset) -> None:
        earlier_run_ids = airflow.run_ids(NIGHT_DAG)
        airflow.pause(NIGHT_DAG, data.profiles is not None)
        with self.steps.step("DAG train_reference: the model bundle") as step:
            self._wait(airflow, "train_reference", airflow.trigger("train_reference"), step)
        if data.profiles is not None:
            with self.steps.step("Towers that take features too, by ridge regression") as step:
                add_features(demo_folder.bundle, data.histories, data.profiles)
                step.note("an item in no interaction gets its vector from category and price,")
                step.note("a user without a history from country and age")
            airflow.pause(NIGHT_DAG, False)
            airflow.announce(BUNDLE_ASSET)
        with self.steps.step(f"DAG {NIGHT_DAG}: started by the new bundle") as step:
            run = airflow.wait_new(NIGHT_DAG, earlier_run_ids)
            self._wait(airflow, NIGHT_DAG, run, step)

    def _cold_start(self, service: ServiceProcess, data: Dataset) -> None:
        if data.profiles is None:
            return
        with self.steps.step("Cold start: features instead of a history") as step:
            with translate_errors("features alone"):
                self.findings.cold = ask_cold(
                    service.url, data.profiles, data.histories, self.judge
                )
            step.note(f"new user: {describe_features(data.profiles.new_user)}")
            step.note(f"new item: {describe_features(data.profiles.new_item)}")
            self._stop_if_broken()

    def _click(self, service: ServiceProcess, data: Dataset) -> Click:
        click = Click(service.url, data, self.judge)
        with self.steps.step("A click, as an event") as step, translate_errors("fresh events"):
            click.send(step)
        self.findings.counted_ms = click.counted_ms
        self._stop_if_broken()
        return click

    def _wait(self, airflow: LocalAirflow, dag: str, run: str, step: Step) -> RunReport:
        step.bar("tasks", None)

        def report_task(task: Any) -> None:
            step.advance(1)
            step.say(f"{task.task_id} {task.duration_s:.1f} s")

        report = airflow.wait(dag, run, RUN_TIMEOUT_S, on_task=report_task)
        quickest_first = sorted(report.tasks, key=lambda task: task.duration_s)
        longest = {task.task_id: task.duration_s for task in quickest_first}
        named = [f"{name} {longest[name]:.1f} s" for name in list(longest)[-2:][::-1]]
        step.note(
            f"{len(report.tasks)} task{'s' * (len(report.tasks) > 1)}, longest {', '.join(named)}"
        )
        return report

    def _live(self, service: ServiceProcess) -> str:
        try:
            with Client(service.url) as larder:
                return larder.generations().live.generation
        except Unanswered as error:
            raise InvariantViolation(f"the service does not say what is live: {error}") from error

    def _follow(
        self,
        service: ServiceProcess,
        expected_generation: str | None = None,
        *,
        unlike: str | None = None,
    ) -> str:
        """Wait until the service answers from `expected_generation` (or from any but `unlike`)."""
        give_up = time.monotonic() + FOLLOW_S
        while time.monotonic() < give_up:
            service.check()
            live = self._live(service)
            if live == expected_generation or (expected_generation is None and live != unlike):
                return live
            time.sleep(0.05)
        raise InvariantViolation(
            f"the service still answers from {live} {FOLLOW_S:.0f} s after the pointer moved"
        )

    def _replay(self, service: ServiceProcess, stream: Stream) -> None:
        with self.steps.step(f"Replay {self.plan.requests:,} requests") as step:
            step.bar("requests", self.plan.requests)
            started_at = time.perf_counter()
            work = replay(
                service.url,
                stream,
                self.judge,
                requests=self.plan.requests,
                concurrency=8,
                rate=REPLAY_RATE,
                progress=step.advance,
            )
            self.findings.quiet = asyncio.run(work)
            rate = self.plan.requests / (time.perf_counter() - started_at)
            step.note(f"{rate:,.0f} requests/s, 8 connections, client and server on one machine")
            self._stop_if_broken()

    def _evaluate(self, service: ServiceProcess, demo_folder: DemoFolder, data: Dataset) -> None:
        users = [user for user, items in data.held_out.items() if items]
        if not users:
            return

        def judged(answers: Sequence[Mapping[str, Any]]) -> None:
            questions = [Question("user_topk", str(answer["id"]), TOP) for answer in answers]
            self.judge.request(questions, answers)

        with self.steps.step(f"Recall and NDCG at {TOP}, read through HTTP") as step:
            try:
                stored_lists = asyncio.run(served_lists(service.url, users, judged))
            except Unanswered as error:
                raise InvariantViolation(f"a batch of users has no answer: {error}") from error
            served = self.findings.served = quality(stored_lists.lists, data.held_out)
            step.note(f"{served.users:,} users: recall {served.recall:.6f}, NDCG {served.ndcg:.6f}")
            if stored_lists.asked_again:
                step.note(f"{stored_lists.asked_again} asked again after a deadline")
        with self.steps.step("The same offline: plain numpy over the bundle") as step:
            step.bar("users", len(users))
            exact = offline_lists(
                demo_folder.bundle, data.histories, users, step.advance, data.profiles
            )
            offline = self.findings.offline = quality(exact, data.held_out)
            step.note(f"recall {offline.recall:.6f}, NDCG {offline.ndcg:.6f}")
            if not served.agrees_with(offline):
                raise InvariantViolation(
                    f"served quality {served} is not the bundle's own {offline}"
                )
            self._stop_if_broken()

    def _second_night(
        self,
        airflow: LocalAirflow,
        service: ServiceProcess,
        stream: Stream,
        demo_folder: DemoFolder,
        data: Dataset,
        click: Click,
    ) -> None:
        findings = self.findings
        data.write_second(demo_folder.home / "data")
        with Background(service.url, stream, self.judge, rate=150.0) as traffic:
            with self.steps.step(f"DAG {NIGHT_DAG}: a day later, under traffic") as step:
                run = airflow.trigger(NIGHT_DAG, {"data_until": data.second_cut.isoformat()})
                self._wait(airflow, NIGHT_DAG, run, step)
                findings.second = self._follow(service, unlike=findings.first)
                step.note(f"generation {findings.second}")
                with translate_errors("fresh events"):
                    click.taken_over(step)
            with self.steps.step("DAG roll_back, under traffic") as step:
                run = airflow.trigger("roll_back", {"reason": "the demo takes it back"})
                airflow.wait("roll_back", run, RUN_TIMEOUT_S)
                self._follow(service, findings.first)
                # Whoever asks from now on must not hear of it again.
                self.judge.rolled_back_generations.add(findings.second)
                step.note(f"{findings.first} is live again")
                with translate_errors("fresh events"):
                    click.counted_again(step)
            with self.steps.step("Traffic goes on, none of it from what was rolled back"):
                time.sleep(3.0)
                service.check()
        click.judged()
        findings.busy = traffic.latencies
        self._stop_if_broken()
        if not self.judge.generations[findings.second]:
            raise InvariantViolation(f"{findings.second} was live and never answered")

    def _audit(self, service: ServiceProcess, demo_folder: DemoFolder) -> ServiceCounts:
        with self.steps.step("Audit: every answer against the service's own counters") as step:
            counts = asyncio.run(scrape(service.url))
            for line in counts.disagreements(self.judge.sources, self.judge.entities):
                self.judge.complain(line)
            moves = [
                release
                for release in all_releases(
                    ArtefactStore(str(demo_folder.artifacts / demo_folder.namespace))
                )
                if release.is_done
            ]
            self.judge.published({release.generation for release in moves})
            self._stop_if_broken()
            step.note(
                f"{self.judge.requests:,} requests, {self.judge.entities:,} entities, 0 violations"
            )
        return counts

    def _stop_if_broken(self) -> None:
        if self.judge.broken:
            violations_text = "\n  ".join(self.judge.violations[:5])
            raise InvariantViolation(
                f"{self.judge.broken} violations, the first of them:\n  {violations_text}"
            )

    def _serve(
        self, service: ServiceProcess, airflow: LocalAirflow, demo_folder: DemoFolder, data: Dataset
    ) -> None:
        invite(self.steps.console, service.url, airflow.url, demo_folder.home, data)
        try:
            while True:
                time.sleep(1.0)
                service.check()
        except KeyboardInterrupt:
            return  # how it is meant to end
