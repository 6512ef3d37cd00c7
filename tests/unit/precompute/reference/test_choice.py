"""What a reference model's shape is chosen by."""

import numpy as np
import pytest

from precompute.bundles import held_out
from precompute.reference import train
from precompute.reference.matrix_factorisation import AlternatingShape, ModelShape, SpectralShape
from precompute.reference.train import choose_shape

USERS, ITEMS, GROUPS = 400, 60, 6


def clicks(seed: int = 0, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """(users, items): users who like one of six groups of items, and now and then any other."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(USERS), 8)
    group_items = rng.integers(0, ITEMS // GROUPS, len(users)) * GROUPS + users % GROUPS
    return users, np.where(rng.random(len(users)) < noise, rng.integers(0, ITEMS, len(users)), group_items)


def test_every_shape_is_tried_and_the_chosen_one_finds_about_as_much_as_the_best():
    shape_choice = choose_shape(*clicks(), ITEMS, 16, np.random.default_rng(0))

    best_recall = max(trial.held_out_recall for trial in shape_choice.trials)
    assert len(shape_choice.trials) == len({trial.shape for trial in shape_choice.trials})
    assert {trial.shape.dims for trial in shape_choice.trials} == {16, 8, 4, 2}
    assert shape_choice.held_out_recall is not None and shape_choice.held_out_recall >= best_recall * 0.97


def test_exponents_that_a_trial_cannot_tell_apart_from_the_best_are_the_usual_ones():
    rng = np.random.default_rng(0)
    usual, rival_recalls = rng.random(1_000), rng.random(1_000)
    rival_recalls += usual.mean() - rival_recalls.mean() + 0.001
    shapes: dict[ModelShape, list[np.ndarray]] = {
        SpectralShape(0.25, 0.2): [rival_recalls],
        SpectralShape(0.5, 0.4): [usual],
        SpectralShape(0.5, 0.3): [usual - 0.2],
    }

    tied = train._best_shape(shapes)
    clear = train._best_shape(shapes | {SpectralShape(0.25, 0.2): [usual + 0.1]})

    assert tied == SpectralShape(0.5, 0.4) and clear == SpectralShape(0.25, 0.2)


@pytest.mark.parametrize(("gain", "method"), [(0.05, "spectral"), (0.07, "alternating")])
def test_alternating_vectors_are_taken_only_where_they_find_clearly_more(monkeypatch, gain, method):
    def tried(recalls_by_shape, shapes, cuts, rng, progress):
        for shape in shapes:
            finds = 0.5 * (1 + gain * isinstance(shape, AlternatingShape))
            recalls_by_shape.setdefault(shape, [np.full(100, finds)])

    monkeypatch.setattr(train, "_try_shapes", tried)

    shape_choice = choose_shape(*clicks(), ITEMS, 16, np.random.default_rng(0))

    assert shape_choice.method_name == shape_choice.report_fields()["method"] == method
    assert isinstance(shape_choice.shape, AlternatingShape) == (method == "alternating")


def test_users_of_six_groups_need_no_more_dimensions_than_about_as_many():
    shape_choice = choose_shape(*clicks(noise=0.0), ITEMS, 48, np.random.default_rng(0))

    assert (
        shape_choice.shape.dims <= 12
        and shape_choice.held_out_recall is not None
        and shape_choice.held_out_recall > 0.9
    )


def test_the_same_seed_chooses_the_same():
    first, second = (choose_shape(*clicks(), ITEMS, 16, np.random.default_rng(3)) for _ in range(2))

    assert first == second


def test_little_data_is_cut_more_than_once_and_by_time_only_once():
    users, items = clicks()
    times = np.random.default_rng(0).permutation(len(users))

    at_random = choose_shape(users, items, ITEMS, 8, np.random.default_rng(0))
    latest = choose_shape(users, items, ITEMS, 8, np.random.default_rng(0), times=times)

    assert at_random.cut_count == train.CUTS_MAX and not at_random.is_by_time
    assert latest.cut_count == 1 and latest.is_by_time


def test_with_times_the_latest_items_are_held_out(monkeypatch):
    """Given users who turned from even to odd items, what is to be found is odd."""
    users, order = np.repeat(np.arange(50), 10), np.tile(np.arange(10), 50)
    items = np.where(order < 8, 2 * order, 2 * order + 1)
    mixed = np.random.default_rng(0).permutation(len(users))
    held_out_arrays = []
    real = held_out.recall_by_user

    def caught(vectors, rows, input_histories, targets, metric):
        held_out_arrays.append(targets.indices)
        return real(vectors, rows, input_histories, targets, metric)

    monkeypatch.setattr(held_out, "recall_by_user", caught)

    choose_shape(users[mixed], items[mixed], 20, 4, np.random.default_rng(0), times=order[mixed])

    assert held_out_arrays and all((held_out_items % 2 == 1).all() for held_out_items in held_out_arrays)


def test_a_large_data_set_is_judged_on_a_sample_of_whole_users(monkeypatch):
    monkeypatch.setattr(train, "SAMPLE_INTERACTIONS_MAX", 1_000)

    shape_choice = choose_shape(*clicks(), ITEMS, 8, np.random.default_rng(0))

    assert 900 < shape_choice.interaction_count <= 1_000 and shape_choice.trials


@pytest.mark.parametrize("repeats", [1, 3])
def test_without_a_user_whose_history_can_be_cut_it_is_the_default(repeats):
    users = np.tile(np.arange(5), repeats)

    shape_choice = choose_shape(users, users, 5, 4, np.random.default_rng(0))

    assert (
        shape_choice.shape == SpectralShape(dims=4) and not shape_choice.trials and shape_choice.held_out_recall is None
    )
