"""Edits of the experiments: what is refused and why, what repeats, and whose keys move."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ConfigError, Conflict
from cache.traffic.experiments import ARM_NAMESPACES_MAX, RUNNING_EXPERIMENTS_MAX, Experiments
from cache.traffic.split import BUCKET_COUNT, bucket_count
from precompute.traffic import experiments as edits
from precompute.traffic.experiments import ArmOption, ExperimentOption

KEYS = [f"key-{number}".encode() for number in range(3_000)]


def make_option(name: str = "ranker", key_share: float = 0.2, other_namespace: str = "second") -> ExperimentOption:
    arms = (ArmOption("control", "default", 0.5), ArmOption("other", other_namespace, 0.5))
    return ExperimentOption("default", name, arms, key_share)


def assigned(experiments: Experiments) -> dict[bytes, tuple[str, str | None] | None]:
    """Experiment and arm of each key."""
    owners, arms = (experiments.owners, {experiment.name: experiment.owners for experiment in experiments.current})
    named = {key: owners.owner_of(key) for key in KEYS}
    return {key: None if name is None else (name, arms[name].owner_of(key)) for key, name in named.items()}


def test_a_repeat_is_the_same_and_anything_else_of_that_name_is_refused() -> None:
    experiments = edits.add_experiment(Experiments(), make_option(), requested_at=1.0)

    assert edits.add_experiment(experiments, make_option(), requested_at=2.0) == experiments
    with pytest.raises(Conflict, match="other arms or shares"):
        edits.add_experiment(experiments, make_option(key_share=0.3), requested_at=2.0)
    over = edits.end_experiment(edits.begin_experiment(experiments, "ranker", started_at=3.0), "ranker", stopped_at=4.0)
    assert edits.end_experiment(over, "ranker", stopped_at=5.0) == over
    for change in (
        lambda: edits.add_experiment(over, make_option(), requested_at=5.0),
        lambda: edits.begin_experiment(over, "ranker", started_at=5.0),
        lambda: edits.share_keys(over, {"ranker": 0.3}),
        lambda: edits.share_arms(over, "ranker", {"other": 1.0}),
    ):
        with pytest.raises(Conflict, match="is over"):
            change()
    with pytest.raises(Conflict, match="no experiment 'nobody'"):
        edits.end_experiment(over, "nobody", stopped_at=5.0)


@pytest.mark.parametrize(
    ("arms", "key_share", "message_pattern"),
    [
        ((("control", "default", 1.0),), 0.2, "2 to 8 arms"),
        ((("a", "default", 0.5), ("a", "second", 0.5)), 0.2, "different names"),
        ((("A", "default", 0.5), ("b", "second", 0.5)), 0.2, "is not a name"),
        ((("a", "second", 0.5), ("b", "third", 0.5)), 0.2, "own namespace"),
        ((("a", "default", 0.5), ("b", "default", 0.5)), 0.2, "own namespace"),
        ((("a", "default", 0.5), ("b", "second", 0.6)), 0.2, "sum to 1, not to 1.1"),
        ((("a", "default", -0.5), ("b", "second", 1.5)), 0.2, "must sum to 1"),
        ((("a", "default", 0.5), ("b", "second", 0.5)), 0.0, "--share must be above 0"),
        ((("a", "default", 0.5), ("b", "second", 0.5)), float("nan"), "--share must be above 0"),
    ],
)
def test_what_can_be_no_experiment_is_refused(
    arms: tuple[tuple[str, str, float], ...], key_share: float, message_pattern: str
) -> None:
    with pytest.raises(ConfigError, match=message_pattern):
        ExperimentOption("default", "ranker", tuple(ArmOption(*arm) for arm in arms), key_share)


def test_keys_are_nobodys_twice_and_too_few_are_refused_with_how_many_are_free() -> None:
    experiments = edits.add_experiment(Experiments(), make_option(key_share=0.6), holdout_share=0.1, requested_at=1.0)

    with pytest.raises(Conflict, match=r"would have 1\.1 of all keys: 0\.3 are free"):
        edits.add_experiment(experiments, make_option("second", key_share=0.4), requested_at=2.0)
    with pytest.raises(Conflict, match=r"0\.4 are free"):
        edits.share_keys(experiments, {}, holdout_share=0.5)
    with pytest.raises(ConfigError, match="--holdout"):
        edits.share_keys(experiments, {}, holdout_share=1.0)
    experiments = edits.add_experiment(experiments, make_option("second", key_share=0.3), requested_at=2.0)
    assert bucket_count(experiments.holdout) == 1_000 and None not in {
        assignment and assignment[1] for assignment in assigned(experiments).values() if assignment is not None
    }


def test_no_more_run_and_no_more_namespaces_are_held_than_replicas_can_hold() -> None:
    experiments = Experiments()
    for number in range(ARM_NAMESPACES_MAX):
        experiments = edits.add_experiment(experiments, make_option(f"e{number}", 0.05, f"n{number}"), requested_at=1.0)

    with pytest.raises(Conflict, match=f"{RUNNING_EXPERIMENTS_MAX} experiments run already"):
        edits.add_experiment(experiments, make_option("more", 0.05, "n0"), requested_at=1.0)
    experiments = edits.end_experiment(experiments, "e0", stopped_at=2.0)
    arms = (*make_option().arms[:1], ArmOption("b", "x", 0.2), ArmOption("c", "y", 0.3))
    with pytest.raises(Conflict, match="9 namespaces beside their own, 8 are allowed"):
        edits.add_experiment(experiments, ExperimentOption("default", "more", arms, 0.05), requested_at=3.0)


@given(st.data())
def test_keys_move_only_by_the_share_that_changes(data: st.DataObject) -> None:
    experiments = edits.add_experiment(Experiments(), make_option("one", 0.3), holdout_share=0.1, requested_at=1.0)
    experiments = edits.add_experiment(experiments, make_option("two", 0.3), requested_at=1.0)
    initial_assignments = assigned(experiments)
    holdout = experiments.holdout

    match data.draw(st.sampled_from(("keys", "arms", "end", "add"))):
        case "keys":
            drawn_share = data.draw(st.integers(1, 60)) / 100
            experiments = edits.share_keys(experiments, {"one": drawn_share})
            after = assigned(experiments)
            # Keys enter the experiment from none, or leave it, never both; the other experiment does not change.
            moved = {
                (_name(initial_assignments[key]), _name(after[key]))
                for key in KEYS
                if after[key] != initial_assignments[key]
            }
            assert moved <= ({(None, "one")} if drawn_share > 0.3 else {("one", None)})
            assert bucket_count(experiments.current[0].buckets) == round(drawn_share * BUCKET_COUNT)
        case "arms":
            drawn_share = data.draw(st.integers(0, 100)) / 100
            experiments = edits.share_arms(experiments, "one", {"control": drawn_share, "other": 1 - drawn_share})
            after = assigned(experiments)
            moved_keys = [key for key in KEYS if after[key] != initial_assignments[key]]
            assert {_name(initial_assignments[key]) for key in moved_keys} <= {"one"}
            # All moved keys go to the arm that grew.
            grown_arm = "control" if drawn_share > 0.5 else "other"
            assert {after[key] for key in moved_keys} <= {("one", grown_arm)}
        case "end":
            experiments = edits.end_experiment(experiments, "one", stopped_at=9.0)
            after = assigned(experiments)
            assert {key for key in KEYS if after[key] != initial_assignments[key]} == {
                key for key in KEYS if _name(initial_assignments[key]) == "one"
            }
        case "add":
            experiments = edits.add_experiment(experiments, make_option("three", 0.3), requested_at=2.0)
            after = assigned(experiments)
            assert {_name(initial_assignments[key]) for key in KEYS if after[key] != initial_assignments[key]} == {None}
    assert experiments.holdout == holdout


def _name(assignment: tuple[str, str | None] | None) -> str | None:
    return None if assignment is None else assignment[0]
