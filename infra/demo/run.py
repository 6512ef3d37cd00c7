"""The demo itself: two nights through Airflow, traffic, a click, a swap and a rollback under it, all checked."""

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
from infra.demo.dataset import INTERACTIONS, Dataset, synthetic, user_data
from infra.demo.evaluate import TOP, offline_lists, quality, served_lists
from infra.demo.features import add_features, ask_cold
from infra.demo.synthetic import World
from infra.demo.traffic import Stream, background, replay
from infra.local.airflow import MANUAL_SCHEDULE, LocalAirflow, hold_lock
from infra.local.service import ServiceProcess
from precompute.config.console import table_of
from serving.client import Answer, Client, EventReceipt, NewEvent, Options

PATIENCE_S = 10.0
"""Seconds until the service follows the pointer, counts a click, and shows the click on its dashboard."""

NIGHT_DAG = "nightly_precompute"
RUN_TIMEOUT_S = 900.0
QUALITY_TOLERANCE = 5e-5
"""Difference of recall or NDCG up to which both are the same: items whose scores tie may come in another order."""

SCORERS = 2
"""Scoring tasks at a time, the slots of the pool: together they fill the machine."""

REPLAY_RATE, BUSY_RATE = 300.0, 150.0
"""Requests per second of the measured replay, and under the second night: below what one worker can do."""


def write_settings(home: Path, namespace: str, data: Dataset) -> None:
    """Write the settings that differ from the defaults."""
    tables = {} if data.profiles is None else data.profiles.tables
    sources = "".join(f'{name} = "data/{name}.parquet"\n' for name in tables)
    (home / "larder.toml").write_text(f"""\
namespace = "{namespace}"
artifacts = "artifacts"
bundle = "bundle"
state = "."
data_until = "{data.first_cut.isoformat()}"
shards = 4
events.enabled = true
[sources]
interactions = ["data/{INTERACTIONS}"]
{sources}""")


def environment_of(home: Path, redis_url: str) -> dict[str, str]:
    """Environment of nights and service; settings of the surrounding shell do not reach them."""
    return {name: "" for name in os.environ if name.startswith("LARDER_")} | {
        "LARDER_CONFIG": str(home / "larder.toml"),
        "LARDER_SCHEDULE": MANUAL_SCHEDULE,
        "REDIS_URL": redis_url,
    }


@contextmanager
def prepare_home(state: Path) -> Iterator[Path]:
    """Empty the demo's folder and lock it during the block; raise ConfigError if another run uses it."""
    home = state.resolve() / "demo"
    home.mkdir(parents=True, exist_ok=True)
    lock_error = ConfigError(f"another demo runs in {home}; choose another --state")
    with hold_lock(home / "demo.lock", lock_error):
        for name in ("data", "artifacts", "bundle", "host-cache"):
            shutil.rmtree(home / name, ignore_errors=True)
        yield home


@contextmanager
def step_on(console: Console, title: str) -> Iterator[list[str]]:
    """Run the block as a step, then print its duration, success or failure, and the notes that the block adds."""
    started_at = time.monotonic()
    notes: list[str] = []
    mark = "[red]x[/red]"
    try:
        with console.status(title):
            yield notes
        mark = "[green]✓[/green]"
    except KeyboardInterrupt:
        mark = ""
        raise
    finally:
        if mark:
            seconds = time.monotonic() - started_at
            console.print(f"{mark} {seconds:6.1f} s  [bold]{title}[/bold]", highlight=False)
            for note in notes:
                console.print(f"            {note}", style="dim", markup=False, soft_wrap=True)


class Click:
    """Click of a user for whom nothing else changes, so that the next night's list is the one answered live.

    Every answer is judged. Raises Unanswered, and InvariantViolation with what does not hold.
    """

    def __init__(self, url: str, data: Dataset, judge: Judge) -> None:
        users = [user for user in data.histories if user not in data.arriving]
        self.user = users[0] if users else next(iter(data.histories))
        self.item = ""
        self._is_alone = bool(users)
        self._url, self._judge = url, judge
        self._live: Answer | None = None

    def send(self) -> list[str]:
        """Send the click; return lines about its effect."""
        before = self._look_up().items or ()
        self.item = before[min(1, len(before) - 1)]
        event = NewEvent("demo-click", user=self.user, item=self.item, type="click")
        with Client(self._url, policy=POLICY) as larder:
            receipt = larder.send_events([event])
        started_at = time.perf_counter()
        if receipt.accepted != 1:
            raise InvariantViolation(f"the click was not accepted: {receipt}")
        self._live = self._until_counted()
        counted_ms = (time.perf_counter() - started_at) * 1000
        stored = self._look_up(max_events=0)
        if stored.items != before or stored.events:
            raise InvariantViolation(f"max_events=0 is not the stored list: {stored}")
        return [
            f"{self.user} clicks on {self.item}, the list counts it {counted_ms:.0f} ms after the 202",
            f"before {', '.join(before[:4])}",
            f"after  {', '.join((self._live.items or ())[:4])}",
            self._dashboard(receipt),
        ]

    def taken_over(self) -> list[str]:
        """Hold the list of a night that took the click over against the one that was answered live."""
        answer = self._look_up()
        if answer.events or answer.producer != "batch":
            raise InvariantViolation(
                f"the night did not take the click of {self.user} over: {answer}"
            )
        return self._compare(answer, "it has the click: the list is the one answered live")

    def counted_again(self) -> list[str]:
        """Hold the list after a roll back to a generation without the click against the one that was answered live."""
        return self._compare(self._until_counted(), "the click is counted again: the same list")

    def _compare(self, answer: Answer, line: str) -> list[str]:
        """Return the line if the list could be compared; raise InvariantViolation if it differs from the live one."""
        live = self._live
        if live is None or not self._is_alone or live.approximate or answer.approximate:
            return []
        if answer.items != live.items:
            raise InvariantViolation(f"{self.user} was answered {live.items}, now {answer.items}")
        return [line]

    def _look_up(self, max_events: int | None = None) -> Answer:
        with Client(self._url, policy=POLICY) as larder:
            options = Options(k=TOP, max_events=max_events)
            (answer,) = larder.lookup_many("user_topk", [self.user], options)
        hidden = frozenset([self.item] if answer.events else [])
        self._judge.request([Question("user_topk", self.user, TOP, hidden)], [answer])
        return answer

    def _until_counted(self) -> Answer:
        give_up = time.perf_counter() + PATIENCE_S
        while not (answer := self._look_up()).events:
            if time.perf_counter() > give_up:
                raise InvariantViolation(f"the click of {self.user} is not counted")
            time.sleep(0.005)
        return answer

    def _dashboard(self, receipt: EventReceipt) -> str:
        give_up = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < give_up:
            # If somebody has it open, the document was made already, and may be a moment old.
            events = httpx.get(f"{self._url}/dashboard/data").json().get("events") or {}
            accepted = events.get("results", {}).get("accepted")
            if accepted and events["counted_until"] == receipt.position:
                return f"dashboard: {accepted} accepted, {events['lag_s'] or 0:.1f} s behind"
            time.sleep(0.1)
        raise InvariantViolation(f"the dashboard does not show event {receipt.position}")


@dataclass(slots=True)
class Demo:
    """Run of the demo; everything it starts is gone when `run` returns or raises."""

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
        """Run all; raise InvariantViolation, Unanswered, AirflowFailed, ServiceFailed or LarderError."""
        started_at = time.monotonic()
        with ExitStack() as stack:
            home = stack.enter_context(prepare_home(self.state))
            namespace = f"demo-{secrets.token_hex(4)}"
            self._make_data(home, namespace)
            with step_on(self.console, "Redis and Airflow") as notes:
                environment = environment_of(home, stack.enter_context(redis_url(home, None)))
                self.airflow = stack.enter_context(
                    LocalAirflow(home, environment=environment, pools={"gpu": SCORERS})
                )
                notes.append(self.airflow.url)
            self._first_night(home / "bundle")
            with step_on(self.console, "Lookup service") as notes:
                log = home / "service.log"
                self.service = stack.enter_context(ServiceProcess(log, environment))
                first = self._follow(bool)
                notes.append(f"{self.service.url}, generation {first}")
            self._measure(home / "bundle")
            second = self._second_night(first)
            self._audit(ArtefactStore(str(home / "artifacts" / namespace)))
            checked = f"{self.judge.requests:,} requests: 0 failed, 0 mixed, 0 after the rollback"
            self.summary |= {"live": first, "rolled back": second, "checked": checked}
            self.summary["seconds"] = f"{time.monotonic() - started_at:.0f}"
            self.console.print(table_of(self.summary), highlight=False)
            self.console.print("[green bold]every invariant held[/green bold]")
            if self.is_serving:
                self._serve(home)

    def _make_data(self, home: Path, namespace: str) -> None:
        with step_on(self.console, "Data") as notes:
            today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            users, items = (3_000, 1_000) if self.is_quick else (20_000, 5_000)
            world = World(users, items, ends_at=today, drift=0.3)
            path = self.data_path
            data = synthetic(world) if path is None else user_data(path, today=today)
            data.write(home / "data")
            write_settings(home, namespace, data)
            self.data, self.judge.histories = data, data.histories
            # A full collection over the data would stop the clock that measures the service.
            gc.collect()
            gc.freeze()
            counts = len(data.histories), len(data.table), len(data.held_out)
            notes.append("{:,} users, {:,} interactions, items of {:,} held out".format(*counts))

    def _first_night(self, bundle: Path) -> None:
        profiles, earlier_run_ids = self.data.profiles, self.airflow.run_ids(NIGHT_DAG)
        self.airflow.pause(NIGHT_DAG, profiles is not None)
        with step_on(self.console, "DAG train_reference: the model bundle") as notes:
            notes += self._wait("train_reference", self.airflow.trigger("train_reference"))
        if profiles is not None:
            with step_on(self.console, "Towers that take features, too"):
                add_features(bundle, self.data.histories, profiles)
            self.airflow.pause(NIGHT_DAG, False)
            self.airflow.announce("larder_bundle")
        with step_on(self.console, f"DAG {NIGHT_DAG}: started by the new bundle") as notes:
            notes += self._wait(NIGHT_DAG, self.airflow.wait_new(NIGHT_DAG, earlier_run_ids))

    def _wait(self, dag: str, run: str) -> list[str]:
        tasks = self.airflow.wait(dag, run, RUN_TIMEOUT_S).tasks
        longest = max(tasks, key=lambda task: task.duration_s)
        return [f"tasks: {len(tasks)}; longest: {longest.task_id}, {longest.duration_s:.1f} s"]

    def _measure(self, bundle: Path) -> None:
        data, judge, url = self.data, self.judge, self.service.url
        if data.profiles is not None:
            with step_on(self.console, "Cold start: features instead of a history") as notes:
                notes += ask_cold(url, data.profiles, data.histories, judge)
                judge.stop_if_broken()
        requests = 1_500 if self.is_quick else 6_000
        with step_on(self.console, f"Replay {requests:,} requests, {REPLAY_RATE:.0f} a second"):
            work = replay(url, islice(Stream(data), requests), judge, rate=REPLAY_RATE)
            self.summary["latency"] = _percentiles(asyncio.run(work))
            judge.stop_if_broken()
        if not (users := list(data.held_out)):
            return
        with step_on(self.console, f"Recall and NDCG at {TOP}, over HTTP and offline"):
            served = quality(served_lists(url, users, judge), data.held_out)
            exact = offline_lists(bundle, data.histories, users, data.profiles)
            offline = quality(exact, data.held_out)
            for name, reference in offline.items():
                self.summary[f"{name}@{TOP}"] = (
                    f"{served[name]:.4f} served, {reference:.4f} offline"
                )
                if abs(served[name] - reference) > QUALITY_TOLERANCE:
                    raise InvariantViolation(f"{name}: {served[name]}, not {reference} as offline")
            judge.stop_if_broken()

    def _second_night(self, first: str) -> str:
        """Click, publish another generation and roll it back, under traffic; return the generation's id."""
        data, judge, url = self.data, self.judge, self.service.url
        with step_on(self.console, "A click, as an event") as notes:
            click = Click(url, data, judge)
            notes += click.send()
            judge.stop_if_broken()
        with background(url, Stream(data), judge, rate=BUSY_RATE) as traffic:
            with step_on(self.console, f"DAG {NIGHT_DAG}: a day later, under traffic") as notes:
                run = self.airflow.trigger(NIGHT_DAG, {"data_until": data.second_cut.isoformat()})
                notes += self._wait(NIGHT_DAG, run)
                second = self._follow(lambda live: live != first)
                notes += [f"generation {second}", *click.taken_over()]
            with step_on(self.console, "DAG roll_back, under traffic") as notes:
                run = self.airflow.trigger("roll_back", {"reason": "the demo takes it back"})
                notes += self._wait("roll_back", run)
                self._follow(lambda live: live == first)
                # Whoever asks from now on must not hear of it again.
                judge.rolled_back_generations.add(second)
                notes += [f"{first} is live again", *click.counted_again()]
            with step_on(self.console, "Traffic goes on, none of it from what was rolled back"):
                time.sleep(3.0)
                self.service.check()
        self.summary["under a night"] = _percentiles(traffic.result())
        judge.stop_if_broken()
        if not judge.generations[second]:
            raise InvariantViolation(f"{second} was live and never answered")
        return second

    def _follow(self, is_expected: Callable[[str], bool]) -> str:
        """Wait until the service answers from an expected generation; return its id."""
        give_up = time.monotonic() + PATIENCE_S
        with Client(self.service.url) as larder:
            while not is_expected(live := larder.generations().live.generation):
                self.service.check()
                if time.monotonic() > give_up:
                    raise InvariantViolation(
                        f"{live} still answers {PATIENCE_S:.0f} s after the move"
                    )
                time.sleep(0.05)
        return live

    def _audit(self, store: ArtefactStore) -> None:
        with step_on(self.console, "Audit: every answer against the service's own counters"):
            metrics = httpx.get(f"{self.service.url}/metrics").raise_for_status().text
            published = {move.generation for move in all_releases(store) if move.is_done}
            self.judge.audit(metrics, published)
        answers = self.judge.sources.total()
        for source, count in self.judge.sources.most_common():
            self.summary[f"from {source}"] = f"{count:,} answers, {count / answers:.2%}"

    def _serve(self, home: Path) -> None:
        url, user = self.service.url, quote(next(iter(self.data.histories)), safe="")
        self.console.print(
            f"\nServing until Ctrl-C: {url}, with /dashboard, /docs and /metrics\n"
            f"Airflow: {self.airflow.url}; files: {home}\n"
            f"Try: curl '{url}/v1/lookup/user_topk/{user}?k=5'",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        with suppress(KeyboardInterrupt):  # how it is meant to end
            while True:
                time.sleep(1.0)
                self.service.check()


def _percentiles(latencies_ms: Sequence[float]) -> str:
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    return f"{len(latencies_ms):,} requests over HTTP: p50 {p50:.2f} ms, p99 {p99:.2f} ms"
