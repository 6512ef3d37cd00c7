"""Experiments in the store: write-once versions, changed without losing anybody's change, read or refused whole."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from cache.errors import CorruptArtefact, UnknownFormat
from cache.store.artefacts import ArtefactStore
from cache.traffic.experiments import (
    ENDED_EXPERIMENTS_MAX,
    EXPERIMENTS_VERSIONS,
    Experiment,
    ExperimentArm,
    Experiments,
    change_experiments,
    latest_experiments,
)

ARMS = (
    ExperimentArm("control", "default", 0.5, ((0, 5000),)),
    ExperimentArm("other", "second", 0.5, ((5000, 10_000),)),
)
RANKER = Experiment("ranker", "default/ranker", 0.2, ((500, 2500),), ARMS, 10.0, 11.0)
EXPERIMENTS = Experiments(0, "default", 0.05, ((0, 500),), (RANKER,))


def add(experiment: Experiment) -> "Experiments":
    return replace(EXPERIMENTS, experiments=(experiment,))


def test_what_was_written_is_read_and_there_is_nothing_before(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))

    assert latest_experiments(store) == Experiments()
    written = change_experiments(store, lambda _experiments: EXPERIMENTS)

    assert written == replace(EXPERIMENTS, version=1) == latest_experiments(store)
    assert change_experiments(store, lambda experiments: experiments) == written
    assert EXPERIMENTS_VERSIONS.read_newest_number(store) == 1
    assert written.namespaces("default") == ("second",) and written.running == (RANKER,)


def test_a_change_that_comes_in_between_is_kept(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    second = replace(RANKER, name="second", buckets=((2500, 3000),))
    calls: list[Experiments] = []

    def slow(experiments: Experiments) -> Experiments:
        if not calls:
            change_experiments(store, lambda _experiments: EXPERIMENTS)
        calls.append(experiments)
        return replace(experiments, experiments=(*experiments.experiments, second))

    changed_experiments = change_experiments(store, slow)

    assert changed_experiments.version == 2 and [experiment.name for experiment in changed_experiments.experiments] == [
        "ranker",
        "second",
    ]
    assert len(calls) == 2


def test_only_the_latest_of_what_ended_are_listed(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    stopped_experiments = tuple(
        replace(RANKER, name=f"e{at}", stopped_at=float(at)) for at in range(ENDED_EXPERIMENTS_MAX + 3)
    )

    changed_experiments = change_experiments(
        store, lambda _experiments: replace(EXPERIMENTS, experiments=(*stopped_experiments, RANKER))
    )

    assert changed_experiments.experiments == (*stopped_experiments[3:], RANKER)
    assert changed_experiments.current == (RANKER,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("holdout", [[0, 501]]),  # the first bucket of the experiment, too
        ("holdout", [[5, 5]]),
        ("holdout", [[0, 10_001]]),
        ("holdout_share", "much"),
        ("experiments", [{"name": "ranker"}]),
    ],
)
def test_what_replicas_could_not_agree_on_is_refused(field: str, value: object) -> None:
    data = orjson.loads(EXPERIMENTS.to_bytes()) | {field: value}

    with pytest.raises(CorruptArtefact):
        Experiments.from_bytes(orjson.dumps(data))


def test_a_newer_format_is_refused_as_such_and_an_unfit_name_too() -> None:
    data = orjson.loads(EXPERIMENTS.to_bytes())

    with pytest.raises(UnknownFormat):
        Experiments.from_bytes(orjson.dumps(data | {"format": 2}))
    data["experiments"][0]["arms"][0]["name"] = "../x"
    with pytest.raises(CorruptArtefact, match="not a name"):
        Experiments.from_bytes(orjson.dumps(data))
