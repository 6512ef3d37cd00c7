"""The closed-form reference model."""

import numpy as np
import pytest

from cache.errors import SourceError
from cache.model.tower import Tower
from precompute.bundles import onnx_model
from precompute.reference.matrix_factorisation import SpectralShape
from precompute.reference.train import AFFINITY_CLUSTERS, ReferenceData, train
from tests.models import ITEMS, USERS, histories_of, interactions, train_small


def test_the_same_data_and_seed_give_the_same_bundle(tmp_path):
    first, second = train_small(tmp_path / "a"), train_small(tmp_path / "b")

    assert first.digest == second.digest


def test_dimensions_shrink_to_the_data(tmp_path):
    bundle = train_small(tmp_path, dims=256)

    assert bundle.dims == ITEMS < USERS


def test_users_rank_their_own_half_of_the_items_first(tmp_path):
    # Given users who like either the even or the odd items
    bundle = train_small(tmp_path, dims=4)
    users = Tower.open(bundle.user_tower.path, bundle.user_tower.spec)
    items = Tower.open(bundle.item_tower.path, bundle.item_tower.spec)

    # When their vectors are multiplied with the items'
    scores = users.run({"history": histories_of()}) @ items.run({"item_index": np.arange(ITEMS)}).T

    # Then their own half scores higher
    is_own_half = np.array([(np.arange(ITEMS) + user) % 2 == 1 for user in range(USERS)])
    assert (np.where(is_own_half, scores, 0).sum(axis=1) > np.where(is_own_half, 0, scores).sum(axis=1)).mean() > 0.9


def test_given_categories_become_the_labels(tmp_path):
    categories = [f"c{number % 3}" for number in range(ITEMS)]

    bundle = train_small(tmp_path, categories=categories)

    assert bundle.value_models["user_affinity"].labels == ("c0", "c1", "c2")


def test_clusters_are_named_by_one_of_their_items(tmp_path):
    labels = train_small(tmp_path).value_models["user_affinity"].labels

    assert len(set(labels)) == len(labels) == AFFINITY_CLUSTERS
    assert all(label.startswith("item-") for label in labels)


def test_the_bundle_says_what_was_chosen_and_how_well_it_found_what_was_held_out(tmp_path):
    users, items = interactions()

    training_facts = train(ReferenceData(users, items, [str(item) for item in range(ITEMS)]), tmp_path).training

    assert training_facts["shapes_tried"] in {33, 39} and 0 < training_facts["recall_at_20"] <= 1
    assert training_facts["held_out"] == "random" and training_facts["users_held_out"] > 0
    assert training_facts["method"] in {"spectral", "alternating"}
    assert {"item_exponent", "ridge", "dims"} <= set(training_facts)


def test_a_choice_with_the_same_seed_gives_the_same_bundle(tmp_path):
    users, items = interactions()
    data = ReferenceData(users, items, [str(item) for item in range(ITEMS)])

    first, second = train(data, tmp_path / "a", dims=16), train(data, tmp_path / "b", dims=16)

    assert first.digest == second.digest


def test_a_given_shape_is_taken_and_nothing_is_tried(tmp_path):
    training_facts = train_small(tmp_path, dims=8).training

    assert training_facts["shapes_tried"] == 0 and training_facts["recall_at_20"] is None
    assert training_facts["dims"] == 8 and training_facts["ridge"] == SpectralShape().ridge


def test_one_user_and_one_item_are_enough(tmp_path):
    only_ordinal = np.zeros(1, np.int64)

    bundle = train(ReferenceData(only_ordinal, only_ordinal, ["only"]), tmp_path)

    assert bundle.dims == 1
    assert bundle.value_models["user_affinity"].labels == ("only",)


def test_no_interactions_are_refused(tmp_path):
    none = np.empty(0, np.int64)

    with pytest.raises(SourceError):
        train(ReferenceData(none, none, ["a"]), tmp_path)


def test_repeated_interactions_count_once(tmp_path):
    users, items = np.array([0, 0, 1]), np.array([0, 1, 1])
    twice = np.concatenate([users, users]), np.concatenate([items, items])

    unique_bundle = train(ReferenceData(users, items, ["a", "b"]), tmp_path / "a")
    repeated_bundle = train(ReferenceData(*twice, ["a", "b"]), tmp_path / "b")

    assert unique_bundle.digest == repeated_bundle.digest


def test_tables_too_large_for_a_model_file_are_stored_next_to_it(tmp_path, monkeypatch):
    """2.1 M items of 256 dimensions failed when they were written, after hours."""
    monkeypatch.setattr(onnx_model, "GRAPH_BYTES_MAX", 4 * 5 * (8 + 1))
    monkeypatch.setattr(onnx_model, "_INLINE_TENSOR_BYTES_MAX", 128)
    rows = np.arange(8)
    data = ReferenceData(rows, rows, [str(row) for row in rows])

    bundle = train(data, tmp_path / "bundle", dims=8)

    assert {model.name for model in bundle.models if model.weights_path} >= {"user_tower", "item_tower"}
