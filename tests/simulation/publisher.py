"""The night and its operators: real release code, each operation in a thread that may pause before any command."""

import contextlib
from collections.abc import Callable
from typing import Any

import redis

from cache.config.night import FlipConfig
from cache.control.control_keys import Control
from cache.control.states import GenerationState
from cache.errors import Conflict, LarderError
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.blocklist import Blocklist, change_blocklist
from cache.traffic.experiments import Experiments, change_experiments, latest_experiments
from precompute.bulk import reload
from precompute.config.progress import quiet
from precompute.releases import moves, recovery, sweep
from precompute.releases.release_log import Releases
from precompute.releases.replication import VerifyReport
from precompute.releases.staging import staged
from precompute.traffic import experiments
from precompute.traffic.experiments import ArmOption, ExperimentOption
from tests.simulation import nights
from tests.simulation.nights import FIRST_NIGHTS, OWN_NAMESPACE, TABLE
from tests.simulation.redis_server import SimulatedRedis

GRACE_S = 10.0
OVERLAY_TTL_S = 600.0
FLIP = FlipConfig(wait_s=20.0, replicas_min=0)


class Publisher:
    """Operations by name; each runs in a thread of the simulation."""

    def __init__(self, redis: SimulatedRedis, store: ArtefactStore, keys: Keyspace) -> None:
        self._redis = redis
        self._store = store
        self._keys = keys
        self.blocked: Callable[[Blocklist], None] = lambda _blocklist: None
        """Told of each version of the blocklist."""
        self.experimented: Callable[[Experiments], None] = lambda _record: None
        """Told of each version of the experiments."""
        self._attempts = self._verdicts = 0
        self._next = FIRST_NIGHTS[keys.namespace]
        self._experiments = 0
        self._baselines: dict[str, str | None] = {}

    def run(self, name: str, *arguments: Any) -> str:
        """Run an operation; return its outcome in words."""
        try:
            return str(getattr(self, name)(*arguments))
        except (LarderError, redis.exceptions.RedisError) as error:
            return f"no: {type(error).__name__}: {error}"[:160]

    def night(self, is_good: bool) -> str:
        """Build a new generation up to its verdict, and publish it."""
        generation = self.build(is_good)
        if is_good:
            self.publish(generation)
        return generation

    def build(self, is_good: bool) -> str:
        """Build a new generation up to its verdict."""
        night, releases = nights.night(self._next), self._releases()
        self._next += 1
        generation = night.generation
        releases.note(generation, GenerationState.BEGUN)
        path = generation_path(generation, "manifest.json")
        self._store.write(path, night.manifest(0).to_bytes())
        load_missing(releases.control, self._store, generation)
        sweep.note_loaded(releases, generation)
        live = releases.ledger().live_generation
        self._verdicts += 1
        if is_good:
            self._store.write(path, night.manifest(self._verdicts).to_bytes())
            self._baselines[generation] = live
            releases.mark_verified(generation, attempt=self._attempt())
        else:
            moves.refuse(releases, generation, reason="bad", attempt=self._attempt())
            self._store.write(path, night.manifest(self._verdicts, False).to_bytes())
        return generation

    def publish(self, generation: str) -> str:
        """Publish a generation once replicas hold it, as the step `publish` does."""
        releases, attempt = self._releases(), self._attempt()
        report: VerifyReport = {"baseline": self._baselines.get(generation)}
        if moves.prepare_publish(releases, generation, attempt=attempt, verified=report) is None:
            with staged(releases.control, generation, FLIP, attempt=attempt):
                moves.publish(releases, generation, attempt=attempt, verified=report)
        return generation

    def canary(self, percent: float) -> str:
        """Build a generation and let it answer a share of the requests."""
        generation = self.build(True)
        releases, attempt = self._releases(), self._attempt()
        report: VerifyReport = {"baseline": self._baselines[generation]}
        with staged(releases.control, generation, FLIP, attempt=attempt):
            moves.start_canary(releases, generation, percent, attempt, verified=report)
        return generation

    def end_canary(self, abandon: bool) -> str:
        """End the canary: publish or abandon it."""
        releases = self._releases()
        pointer = releases.control.read_pointer()
        if pointer is None or pointer.canary is None:
            return "no canary runs"
        if abandon:
            moves.end_canary(releases, self._attempt(), "enough", True)
        else:
            self.publish(pointer.canary.generation)
        return pointer.canary.generation

    def roll_back(self) -> str:
        """Roll back by one generation."""
        moved = moves.roll_back(self._releases(), target_generation=None, reason="bad", attempt=self._attempt())
        return moved.pointer.generation

    def retire(self) -> str:
        """Remove generations that nobody needs."""
        releases, retired_generations = self._releases(), []
        for generation in sweep.unneeded_generations(releases, kept_generations=1, grace_s=GRACE_S):
            with contextlib.suppress(Conflict):
                sweep.retire(releases, generation, attempt=self._attempt(), grace_s=GRACE_S)
                retired_generations.append(generation)
        return f"{retired_generations} retired"

    def restore(self) -> str:
        """Restore what Redis lost."""
        pointer, loaded, _ = recovery.restore_redis(
            self._releases(), attempt=self._attempt(), chunk_bytes=1, overlay_ttl_s=OVERLAY_TTL_S
        )
        return f"{pointer.generation} with {loaded}"

    def block(self, item: str | None, user: str | None, erased: str | None = None) -> str:
        """Block one more entity."""
        return self._change(
            block_items=[item.encode()] if item else (),
            block_entities=[user.encode()] if user else (),
            block_users=[erased.encode()] if erased else (),
        )

    def unblock(self, item: str | None, user: str | None) -> str:
        """Unblock one entity."""
        return self._change(
            unblock_items=[item.encode()] if item else (), unblock_entities=[user.encode()] if user else ()
        )

    def experiment(self, namespaces: tuple[str, ...], share: float) -> str:
        """Start an experiment with an arm in each of these namespaces, once all replicas hold them."""
        self._experiments += 1
        name = f"e{self._experiments}"
        parts = 1 / (1 + len(namespaces))
        arms = (
            ArmOption("control", OWN_NAMESPACE, parts),
            *(ArmOption(namespace, namespace, parts) for namespace in namespaces),
        )
        own_control = self._control(OWN_NAMESPACE)
        controls = {arm.namespace: self._control(arm.namespace) for arm in arms}
        option = ExperimentOption(OWN_NAMESPACE, name, arms, share)
        self._edit(lambda record: experiments.add_experiment(record, option, requested_at=own_control.time()))
        experiments._wait_for_replicas(own_control, controls, name, FLIP.wait_s, quiet)
        self._edit(lambda record: experiments.begin_experiment(record, name, started_at=own_control.time()))
        return f"{name} in {namespaces}"

    def stop_experiment(self, position: int) -> str:
        """Stop one of the running experiments."""
        name = self._current(position)
        self._edit(
            lambda record: experiments.end_experiment(record, name, stopped_at=self._control(OWN_NAMESPACE).time())
        )
        return name

    def change_share(self, position: int, share: float, control: float | None) -> str:
        """Change the share of a running experiment, or the shares of its arms."""
        name = self._current(position)
        if control is None:
            self._edit(lambda record: experiments.share_keys(record, {name: share}))
            return f"{name} {share}"
        experiment = experiments.current_experiment(latest_experiments(self._store), name)
        other_arms = [arm.name for arm in experiment.arms if arm.name != "control"]
        arm_shares = {"control": control, **dict.fromkeys(other_arms, (1 - control) / len(other_arms))}
        self._edit(lambda record: experiments.share_arms(record, name, arm_shares))
        return f"{name} {arm_shares}"

    def _current(self, position: int) -> str:
        names = [experiment.name for experiment in latest_experiments(self._store).current]
        if not names:
            raise Conflict("no experiment is there")
        return names[position % len(names)]

    def _edit(self, edit: Callable[[Experiments], Experiments]) -> None:
        self.experimented(change_experiments(self._store, edit))
        self._redis.publish(self._keys.channel, "experiments")

    def _control(self, namespace: str) -> Control:
        return Control(self._redis, Keyspace(namespace))  # type: ignore[arg-type]

    def _change(self, **changes: Any) -> str:
        blocklist = change_blocklist(self._store, **changes)
        self.blocked(blocklist)
        self._redis.publish(self._keys.channel, "blocklist")
        return f"version {blocklist.version}"

    def _releases(self) -> Releases:
        return Releases(self._store, Control(self._redis, self._keys))  # type: ignore[arg-type]

    def _attempt(self) -> str:
        self._attempts += 1
        return f"attempt-{self._attempts}"


def load_missing(control: Control, _store: ArtefactStore, generation: str, **_options: Any) -> int:
    """Write missing pages to Redis one by one, then their mark."""
    night = nights.night(nights.number_of(generation))
    for number, page in enumerate(night.pages):
        name = control.keyspace.page(generation, TABLE, number)
        if control.client.get(name) != page:
            control.client.set(name, page)
    control.client.hset(control.keyspace.loaded_parts(generation), f"{TABLE}/0", "mark")
    return 0


MODELLED: dict[Any, Any] = {
    reload.load_missing: load_missing,
    reload.reload: load_missing,
    reload.repair_pages: lambda *_arguments, **_options: [],
}
"""What reads pages from files: here they come from `nights`. All else is what runs in production."""
