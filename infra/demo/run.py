"""Run of the demo: two nights through Airflow, and a click, a publish and a roll back under traffic, all checked."""

import asyncio
import gc
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
from rich.console import Console

from cache.errors import ConfigError
from cache.process.redis_server import redis_url
from cache.store.artefacts import ArtefactStore
from cache.store.releases import all_releases
from infra.demo.checks import POLICY, InvariantViolation, Judge, Question
from infra.demo.dataset import INTERACTIONS_FILE, Dataset, make_synthetic_data, read_user_data
from infra.demo.evaluate import LIST_LENGTH, offline_lists, recall_and_ndcg, served_lists
from infra.demo.features import add_features, ask_cold_entities
from infra.demo.synthetic import WorldSettings
from infra.demo.traffic import RequestStream, replay, replay_in_background
from infra.local.airflow import MANUAL_SCHEDULE, LocalAirflow, hold_lock
from infra.local.service import ServiceProcess
from precompute.config.console import field_table
from serving.client import Answer, Client, EventReceipt, NewEvent, Options

WAIT_S_MAX = 10.0
"""Maximum wait in seconds until the service follows the pointer, counts a click, or shows it on its dashboard."""

NIGHT_DAG = "nightly_precompute"
RUN_TIMEOUT_S = 900.0
QUALITY_TOLERANCE = 5e-5
"""Largest accepted difference of recall or NDCG: items with equal scores may come in another order."""

SCORING_TASKS_MAX = 2
"""Slots of the pool, hence scoring tasks that run at a time: two use all cores of the machine."""

REPLAY_RATE, BUSY_RATE = 300.0, 150.0
"""Requests per second of the measured replay and during the second night; one worker can answer more."""


def write_settings(home: Path, namespace: str, dataset: Dataset) -> None:
    """Write the settings that differ from the defaults."""
    table_names = {} if dataset.profiles is None else dataset.profiles.tables
    sources = "".join(f'{table_name} = "data/{table_name}.parquet"\n' for table_name in table_names)
    (home / "larder.toml").write_text(f"""\
namespace = "{namespace}"
artifacts = "artifacts"
bundle = "bundle"
state = "."
data_until = "{dataset.first_cut.isoformat()}"
shards = 4
events.enabled = true
[sources]
interactions = ["data/{INTERACTIONS_FILE}"]
{sources}""")


def process_environment(demo_folder: Path, redis_url: str) -> dict[str, str]:
    """Return the environment of nights and service, in which LARDER_* variables of the shell are emptied."""
    return {name: "" for name in os.environ if name.startswith("LARDER_")} | {
        "LARDER_CONFIG": str(demo_folder / "larder.toml"),
        "LARDER_SCHEDULE": MANUAL_SCHEDULE,
        "REDIS_URL": redis_url,
    }


@contextmanager
def prepare_demo_folder(state: Path) -> Iterator[Path]:
    """Yield the demo's folder, locked and without earlier data; raise ConfigError if another demo uses it."""
    demo_folder = state.resolve() / "demo"
    demo_folder.mkdir(parents=True, exist_ok=True)
    lock_error = ConfigError(f"another demo runs in {demo_folder}; choose another --state")
    with hold_lock(demo_folder / "demo.lock", lock_error):
        for subfolder_name in ("data", "artifacts", "bundle", "host-cache"):
            shutil.rmtree(demo_folder / subfolder_name, ignore_errors=True)
        yield demo_folder


@contextmanager
def run_demo_step(console: Console, title: str) -> Iterator[list[str]]:
    """Run the block as a step; then print its result, duration, and the notes that the block added to the list."""
    started_at = time.monotonic()
    notes: list[str] = []
    result_mark = "[red]x[/red]"
    try:
        with console.status(title):
            yield notes
        result_mark = "[green]✓[/green]"
    except KeyboardInterrupt:
        result_mark = ""
        raise
    finally:
        if result_mark:
            seconds = time.monotonic() - started_at
            console.print(f"{result_mark} {seconds:6.1f} s  [bold]{title}[/bold]", highlight=False)
            for note in notes:
                console.print(f"            {note}", style="dim", markup=False, soft_wrap=True)


class Click:
    """Click of a user without other new interactions, so that the next night's list must equal the live answer.

    Every answer is judged. Methods raise Unanswered, or InvariantViolation.
    """

    def __init__(self, service_url: str, dataset: Dataset, judge: Judge) -> None:
        unchanged_users = [user for user in dataset.histories if user not in dataset.arriving_users]
        self.user = unchanged_users[0] if unchanged_users else next(iter(dataset.histories))
        self.item, self._is_list_unchanged_else = "", bool(unchanged_users)
        self._url, self._judge = service_url, judge
        self._live_answer: Answer | None = None

    def send(self) -> list[str]:
        """Send the click; return lines that describe its effect."""
        items_before = self._look_up().items or ()
        self.item = items_before[min(1, len(items_before) - 1)]
        event = NewEvent("demo-click", user=self.user, item=self.item, type="click")
        with Client(self._url, policy=POLICY) as larder:
            if (receipt := larder.send_events([event])).accepted != 1:
                raise InvariantViolation(f"the click was not accepted: {receipt}")
        started_at = time.perf_counter()
        self._live_answer = self._wait_until_counted()
        counted_ms = (time.perf_counter() - started_at) * 1000
        if (stored := self._look_up(max_events=0)).items != items_before or stored.events:
            raise InvariantViolation(f"max_events=0 is not the stored list: {stored}")
        return [
            f"{self.user} clicks on {self.item}; the list reflects it {counted_ms:.0f} ms after the 202",
            f"before {', '.join(items_before[:4])}",
            f"after  {', '.join((self._live_answer.items or ())[:4])}",
            self._check_dashboard(receipt),
        ]

    def taken_over(self) -> list[str]:
        """Compare the list of the night that read the click with the earlier live answer."""
        answer = self._look_up()
        if answer.events or answer.producer != "batch":
            raise InvariantViolation(f"the night did not read the click of {self.user}: {answer}")
        return self._compare(answer, "the generation has the click: its list equals the live answer")

    def check_counted_again(self) -> list[str]:
        """Compare the live answer after a roll back to a generation without the click with the earlier live answer."""
        return self._compare(self._wait_until_counted(), "the click is counted live again: the list is the same")

    def _compare(self, answer: Answer, success_line: str) -> list[str]:
        """Return `success_line`, or nothing if lists cannot be compared; raise InvariantViolation if they differ."""
        live_answer = self._live_answer
        if live_answer is None or not self._is_list_unchanged_else or live_answer.approximate or answer.approximate:
            return []
        if answer.items != live_answer.items:
            raise InvariantViolation(f"{self.user} was answered {live_answer.items}, now {answer.items}")
        return [success_line]

    def _look_up(self, max_events: int | None = None) -> Answer:
        with Client(self._url, policy=POLICY) as larder:
            answer = larder.lookup("user_topk", self.user, Options(k=LIST_LENGTH, max_events=max_events))
        hidden = frozenset([self.item] if answer.events else [])
        self._judge.request([Question("user_topk", self.user, LIST_LENGTH, hidden)], [answer])
        return answer

    def _wait_until_counted(self) -> Answer:
        give_up_at = time.perf_counter() + WAIT_S_MAX
        while not (answer := self._look_up()).events:
            if time.perf_counter() > give_up_at:
                raise InvariantViolation(f"the click of {self.user} is not counted")
            time.sleep(0.005)
        return answer

    def _check_dashboard(self, receipt: EventReceipt) -> str:
        give_up_at = time.perf_counter() + WAIT_S_MAX
        while time.perf_counter() < give_up_at:
            # The document is cached, so it may be a moment old if another client reads the dashboard.
            events_document = httpx.get(f"{self._url}/dashboard/data").json().get("events") or {}
            accepted_count = events_document.get("results", {}).get("accepted")
            if accepted_count and events_document["counted_until"] == receipt.position:
                return f"dashboard: {accepted_count} accepted, {events_document['lag_s'] or 0:.1f} s behind"
            time.sleep(0.1)
        raise InvariantViolation(f"the dashboard does not show event {receipt.position}")


@dataclass(slots=True)
class Demo:
    """Run of the demo; all processes that it starts have ended when `run` returns or raises."""

    console: Console
    data_path: Path | None
    state: Path
    is_quick: bool
    is_serving: bool
    judge: Judge = field(default_factory=Judge)
    summary: dict[str, object] = field(default_factory=dict)
    data: Dataset = field(init=False)
    airflow: LocalAirflow = field(init=False)
    service: ServiceProcess = field(init=False)

    def run(self) -> None:
        """Run all steps; raise InvariantViolation, Unanswered, AirflowFailed, ServiceFailed or LarderError."""
        started_at = time.monotonic()
        with ExitStack() as exit_stack:
            demo_folder = exit_stack.enter_context(prepare_demo_folder(self.state))
            namespace = f"demo-{secrets.token_hex(4)}"
            self._make_data(demo_folder, namespace)
            with run_demo_step(self.console, "Redis and Airflow") as notes:
                environment = process_environment(demo_folder, exit_stack.enter_context(redis_url(demo_folder, None)))
                self.airflow = exit_stack.enter_context(
                    LocalAirflow(demo_folder, task_environment=environment, slots_by_pool={"gpu": SCORING_TASKS_MAX})
                )
                notes.append(self.airflow.url)
            self._first_night(demo_folder / "bundle")
            with run_demo_step(self.console, "Lookup service") as notes:
                self.service = exit_stack.enter_context(ServiceProcess(demo_folder / "service.log", environment))
                first_generation = self._follow(bool)
                notes.append(f"{self.service.url}, generation {first_generation}")
            self._measure(demo_folder / "bundle")
            second_generation = self._second_night(first_generation)
            self._audit(ArtefactStore(str(demo_folder / "artifacts" / namespace)))
            self.summary |= {"live": first_generation, "rolled back": second_generation}
            self.summary["checked"] = f"{self.judge.request_count:,} requests: 0 failed, 0 mixed, 0 after the rollback"
            self.summary["seconds"] = f"{time.monotonic() - started_at:.0f}"
            self.console.print(field_table(self.summary), highlight=False)
            self.console.print("[green bold]every invariant held[/green bold]")
            if self.is_serving:
                self._serve(demo_folder)

    def _make_data(self, demo_folder: Path, namespace: str) -> None:
        with run_demo_step(self.console, "Data") as notes:
            today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            user_count, item_count = (3_000, 1_000) if self.is_quick else (20_000, 5_000)
            world = WorldSettings(user_count, item_count, last_click_at=today, fashion_weight=0.3)
            path = self.data_path
            dataset = make_synthetic_data(world) if path is None else read_user_data(path, today=today)
            dataset.write(demo_folder / "data")
            write_settings(demo_folder, namespace, dataset)
            self.data, self.judge.history_by_user = dataset, dataset.histories
            # Without this, a full garbage collection over the data would distort the measured latencies.
            gc.collect()
            gc.freeze()
            counts = len(dataset.histories), len(dataset.table), len(dataset.held_out)
            notes.append("{:,} users, {:,} interactions, items of {:,} held out".format(*counts))

    def _first_night(self, bundle_folder: Path) -> None:
        profiles, earlier_run_ids = self.data.profiles, self.airflow.run_ids(NIGHT_DAG)
        self.airflow.pause(NIGHT_DAG, profiles is not None)
        with run_demo_step(self.console, "DAG train_reference: the model bundle") as notes:
            notes += self._wait_for_run("train_reference", self.airflow.trigger("train_reference"))
        if profiles is not None:
            with run_demo_step(self.console, "Towers that take features, too"):
                add_features(bundle_folder, self.data.histories, profiles)
            self.airflow.pause(NIGHT_DAG, False)
            self.airflow.announce("larder_bundle")
        with run_demo_step(self.console, f"DAG {NIGHT_DAG}: started by the new bundle") as notes:
            notes += self._wait_for_run(NIGHT_DAG, self.airflow.wait_for_new_run(NIGHT_DAG, earlier_run_ids))

    def _wait_for_run(self, dag_id: str, run_id: str) -> list[str]:
        tasks = self.airflow.wait(dag_id, run_id, RUN_TIMEOUT_S).tasks
        longest_task = max(tasks, key=lambda task: task.duration_s)
        return [f"tasks: {len(tasks)}; longest: {longest_task.task_id}, {longest_task.duration_s:.1f} s"]

    def _measure(self, bundle_folder: Path) -> None:
        dataset, judge, url = self.data, self.judge, self.service.url
        if dataset.profiles is not None:
            with run_demo_step(self.console, "Cold start: features instead of a history") as notes:
                notes += ask_cold_entities(url, dataset.profiles, dataset.histories, judge)
                judge.stop_if_broken()
        request_count = 1_500 if self.is_quick else 6_000
        with run_demo_step(self.console, f"Replay {request_count:,} requests, {REPLAY_RATE:.0f} a second"):
            replay_run = replay(url, islice(RequestStream(dataset), request_count), judge, requests_per_s=REPLAY_RATE)
            self.summary["latency"] = _percentiles_text(asyncio.run(replay_run))
            judge.stop_if_broken()
        if not (users := list(dataset.held_out)):
            return
        with run_demo_step(self.console, f"Recall and NDCG at {LIST_LENGTH}, over HTTP and offline"):
            served_quality = recall_and_ndcg(served_lists(url, users, judge), dataset.held_out)
            exact_lists = offline_lists(bundle_folder, dataset.histories, users, dataset.profiles)
            offline_quality = recall_and_ndcg(exact_lists, dataset.held_out)
            for measure_name, offline_value in offline_quality.items():
                value = served_quality[measure_name]
                self.summary[f"{measure_name}@{LIST_LENGTH}"] = f"{value:.4f} served, {offline_value:.4f} offline"
                if abs(value - offline_value) > QUALITY_TOLERANCE:
                    raise InvariantViolation(f"{measure_name}: {value}, not {offline_value} as offline")
            judge.stop_if_broken()

    def _second_night(self, first_generation: str) -> str:
        """Send a click, publish a second generation and roll it back under traffic; return the generation's id."""
        dataset, judge, url = self.data, self.judge, self.service.url
        with run_demo_step(self.console, "A click, as an event") as notes:
            click = Click(url, dataset, judge)
            notes += click.send()
            judge.stop_if_broken()
        with replay_in_background(url, RequestStream(dataset), judge, requests_per_s=BUSY_RATE) as traffic_future:
            with run_demo_step(self.console, f"DAG {NIGHT_DAG}: a day later, under traffic") as notes:
                run_id = self.airflow.trigger(NIGHT_DAG, {"data_until": dataset.second_cut.isoformat()})
                notes += self._wait_for_run(NIGHT_DAG, run_id)
                second_generation = self._follow(lambda live: live != first_generation)
                notes += [f"generation {second_generation}", *click.taken_over()]
            with run_demo_step(self.console, "DAG roll_back, under traffic") as notes:
                run_id = self.airflow.trigger("roll_back", {"reason": "the demo takes it back"})
                notes += self._wait_for_run("roll_back", run_id)
                self._follow(lambda live: live == first_generation)
                # Whoever asks from now on must not hear of it again.
                judge.rolled_back_generations.add(second_generation)
                notes += [f"{first_generation} is live again", *click.check_counted_again()]
            with run_demo_step(self.console, "Traffic goes on, without answers from the rolled back generation"):
                time.sleep(3.0)
                self.service.check()
        self.summary["under a night"] = _percentiles_text(traffic_future.result())
        judge.stop_if_broken()
        if not judge.answers_by_generation[second_generation]:
            raise InvariantViolation(f"{second_generation} was live but gave no answer")
        return second_generation

    def _follow(self, is_expected: Callable[[str], bool]) -> str:
        """Wait until `is_expected` holds for the service's live generation; return its id."""
        give_up_at = time.monotonic() + WAIT_S_MAX
        with Client(self.service.url) as larder:
            while not is_expected(live_generation := larder.generations().live.generation):
                self.service.check()
                if time.monotonic() > give_up_at:
                    raise InvariantViolation(f"{live_generation} still answers {WAIT_S_MAX:.0f} s after the move")
                time.sleep(0.05)
        return live_generation

    def _audit(self, store: ArtefactStore) -> None:
        with run_demo_step(self.console, "Audit: every answer against the service's own counters"):
            published_generations = {move.generation for move in all_releases(store) if move.is_done}
            metrics_text = httpx.get(f"{self.service.url}/metrics").raise_for_status().text
            self.judge.audit_answers(metrics_text, published_generations)
        for source, count in self.judge.answers_by_source.most_common():
            self.summary[f"from {source}"] = f"{count:,} answers, {count / self.judge.answers_by_source.total():.2%}"

    def _serve(self, demo_folder: Path) -> None:
        url, user = self.service.url, quote(next(iter(self.data.histories)), safe="")
        self.console.print(
            f"\nServing until Ctrl-C: {url}, with /dashboard, /docs and /metrics\n"
            f"Airflow: {self.airflow.url}; files: {demo_folder}\n"
            f"Try: curl '{url}/v1/lookup/user_topk/{user}?k=5'",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        with suppress(KeyboardInterrupt):  # the normal end
            while True:
                time.sleep(1.0)
                self.service.check()


def _percentiles_text(latencies_ms: Sequence[float]) -> str:
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    return f"{len(latencies_ms):,} requests over HTTP: p50 {p50:.2f} ms, p99 {p99:.2f} ms"
