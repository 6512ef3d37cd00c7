"""Two equal deployments: in one, processes are killed at random points of every step; in its twin, never."""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from cache.control.control_keys import Control
from cache.l2.sync_clients import connect
from cache.store.artefacts import read_manifest
from precompute.builds.reports import BuildId
from precompute.bulk.load import page_keys
from precompute.config.settings import NightConfig
from precompute.releases.recovery import restore, roll_back
from precompute.steps import load as load_step
from precompute.steps import publish, retire, verify
from precompute.traffic.canary import trial
from tests.integration.killed_steps import build, night, refused
from tests.integration.killing import run
from tests.integration.nights import DATA_UNTIL, top_lists
from tests.integration.watching import Watch
from tests.integration.wholeness import assert_whole, moves, read_namespace_state
from tests.polling import poll_until

STEP_OF_CUTS = timedelta(minutes=11)
LOSSES = ("everything", "control keys", "an older snapshot", "some pages")

Work = Callable[[NightConfig, str], Callable[[], Any]]
"""(where, attempt) -> what to run there, in a process of its own."""


NO_REPORTS = ("assemble", "verified", "holdout")
"""Written anew each time, or by a step (`begin`) whose own report comes after them."""


def reports(config: NightConfig) -> Mapping[Path, int]:
    """Return finished costly steps of all generations, with the time of their last change."""
    root = config.store().local("generations")
    return {
        path: path.stat().st_mtime_ns
        for path in root.glob("*/work/*.json")
        if path.stem not in NO_REPORTS and not path.name.startswith(".")
    }


@dataclass
class Ground:
    """A deployment whose processes are killed, its undisturbed twin, and callers of the first."""

    config: NightConfig
    twin: NightConfig
    watch: Watch
    moments: random.Random
    users: list[str]
    killed: Counter[str] = field(default_factory=Counter)
    cut: datetime = field(default_factory=lambda: datetime.fromisoformat(DATA_UNTIL))

    @property
    def configs(self) -> tuple[NightConfig, NightConfig]:
        return self.config, self.twin

    def next_cut(self) -> str:
        """Return a cut later than every cut before."""
        self.cut += STEP_OF_CUTS
        return self.cut.isoformat()

    def step(self, name: str, work: Work, *, kills: int, has_lost_data: bool = False) -> Any:
        """Do `work` in both, killed up to `kills` times in one; `has_lost_data`: Redis is not whole."""
        measured = run(work(self.twin, self._attempt("undisturbed")))
        assert measured is not None
        if name in ("verify", "night"):
            generation = measured.result["generation"]
            self.watch.expected[generation] = top_lists(self.twin, generation, self.users)
        attempt = self._attempt(name)
        for _ in range(kills):
            point = measured.point(self.moments)
            print(f"{name} of {attempt} killed at {point}", flush=True)
            if run(work(self.config, attempt), point) is not None:
                break
            self.killed[name] += 1
            self.watch.beat()
            if not has_lost_data:
                self.watch.check_order([*moves(self.config), assert_whole(self.config)])
            # A retried task keeps its run's name, a shell command gets another one. An `abandon` under another name is
            # told that no canary runs.
            if name != "abandon" and self.moments.random() < 0.5:
                attempt = self._attempt(name)
        finished = reports(self.config)
        outcome = run(work(self.config, attempt))
        assert outcome is not None
        # Costly steps that had finished are not repeated; the reports of retired generations are gone.
        current_reports = reports(self.config)
        assert [path for path, at in finished.items() if path.exists() and current_reports[path] != at] == []
        self.watch.beat()
        return outcome.result

    def _attempt(self, name: str) -> str:
        return f"{name}-{self.moments.randrange(1 << 32):08x}"

    def follow(self) -> None:
        """Wait until the service answers from the live generation and holds only permitted ones."""
        with connect(self.config.redis_url, 5.0) as client:
            control = Control(client, self.config.keyspace())

            def follows() -> bool:
                pointer, replicas = control.read_pointer(), control.replicas()
                assert pointer is not None
                allowed = {pointer.generation, pointer.previous, *self.watch.canaries}
                return bool(replicas) and all(
                    replica.served_generation == pointer.generation and allowed.issuperset(replica.held_generations)
                    for replica in replicas
                )

            assert poll_until(follows, 20.0), f"{control.read_pointer()}, {control.replicas()}"

    def compare(self) -> None:
        """Check that both deployments are equal and the live generation is whole."""
        self.follow()
        differences = read_namespace_state(self.config).differences(read_namespace_state(self.twin))
        assert not differences, differences
        self.watch.check_order([*moves(self.config), assert_whole(self.config)])

    def make(self, *, kills: int, damaged: bool = False) -> str:
        """Make a verified generation step by step; `damaged`: refused once, and a page broken before it is verified."""
        cut = self.next_cut()
        generation = str(self.step("build", lambda c, _: partial(build, c, cut), kills=1))
        build_result: BuildId = {"generation": generation}
        load: Work = lambda c, _: partial(load_step.run, c, build_result)  # noqa: E731
        self.step("load", load, kills=kills)
        if damaged:
            self.step("refuse", lambda c, attempt: partial(refused, c, generation, attempt), kills=kills)
            self.compare()
            self.damage(generation)
        self.step(
            "verify", lambda c, attempt: partial(verify.run, c, build_result, attempt=attempt), kills=kills
        )  # fmt: skip
        self.compare()
        return generation

    def publish(self, generation: str, *, kills: int) -> None:
        """Publish the generation, then retire those that nobody needs."""
        build_result: BuildId = {"generation": generation}
        self.step(
            "publish", lambda c, attempt: partial(publish.run, c, build_result, attempt=attempt), kills=kills
        )  # fmt: skip
        self.compare()
        self.watch.canaries.discard(generation)
        self.retire(kills=kills)

    def try_out(self, generation: str, *, kills: int) -> None:
        """Start a canary for half of the requests."""
        self.watch.canaries.add(generation)
        self.step(
            "canary", lambda c, attempt: partial(trial.start, c, generation, percent=50.0, attempt=attempt), kills=kills
        )
        self.compare()

    def abandon(self, *, kills: int) -> None:
        """End the canary; it is never published."""
        self.step(
            "abandon",
            lambda c, attempt: partial(trial.abandon, c, reason="a test says so", attempt=attempt),
            kills=kills,
        )
        self.compare()

    def retire(self, *, kills: int) -> None:
        """Retire generations; those that the service still holds stay."""
        self.follow()
        self.step("retire", lambda c, attempt: partial(retire.run, c, attempt=attempt), kills=kills)
        self.compare()

    def whole_night(self, *, kills: int) -> None:
        """Run a night in one process."""
        cut = self.next_cut()
        self.step("night", lambda c, attempt: partial(night, c, cut, attempt), kills=kills)
        # The night's own retirement left what the service held at that moment; this one removes it.
        self.retire(kills=0)

    def roll_back(self, *, kills: int) -> None:
        """Roll back by one generation and retire the one left behind."""
        to = read_namespace_state(self.twin).previous
        reason = "a test says so"
        self.step(
            "roll_back",
            lambda c, attempt: partial(roll_back, c, target_generation=to, reason=reason, attempt=attempt),
            kills=kills,
        )
        self.compare()
        self.retire(kills=kills)

    def restore(self, loss: str, *, kills: int) -> None:
        """Lose something in both Redis databases and bring it back."""
        pages_gone = loss in ("everything", "some pages")
        with self.watch.pages_lost() if pages_gone else nullcontext():
            for config in self.configs:
                self._lose(config, loss)
            self.step(
                "restore", lambda c, attempt: partial(restore, c, attempt=attempt), kills=kills, has_lost_data=True
            )
            self.compare()

    def sweep(self) -> int:
        """Remove unfinished files of killed writers at once instead of after a day; return how many."""
        store = self.config.store()
        swept = store.sweep_unfinished(cutoff_at=time.time() + 1.0)
        assert list(store.local("").rglob("*.part")) == []
        self.compare()
        return swept

    def _lose(self, config: NightConfig, loss: str) -> None:
        keys, rng = config.keyspace(), random.Random(len(self.killed))
        with connect(config.redis_url, 5.0) as client:
            control = Control(client, keys)
            pointer = control.read_pointer()
            assert pointer is not None
            if loss == "everything":
                client.flushdb()
            elif loss == "control keys":
                client.delete(keys.live, keys.generations)
            elif loss == "an older snapshot":
                client.set(keys.live, replace(pointer, epoch=pointer.epoch - 1_000).to_bytes())
            else:
                names = list(page_keys(keys, read_manifest(config.store(), pointer.generation)))
                client.unlink(*rng.sample(names, 5))

    def damage(self, generation: str) -> None:
        """Change one page of a generation in both deployments."""
        for config in self.configs:
            names = sorted(page_keys(config.keyspace(), read_manifest(config.store(), generation)))
            with connect(config.redis_url, 5.0) as client:
                client.setrange(names[len(names) // 2], 17, b"damaged")
