"""Models of vectors: lists of their folder are the library's own ranking."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from cache.errors import SourceError
from precompute.adapters.factorisations import from_lightfm, from_rectools, from_sklearn
from tests.unit.precompute.adapters.written import (
    folded,
    histories_of,
    item_vectors,
    lists,
    ranking,
    taste_clicks,
    user_vectors,
)

CLICKS = taste_clicks()
HISTORIES = histories_of(CLICKS)
LEFT_VECTORS, VALUES, RIGHT = np.linalg.svd(CLICKS.toarray(), full_matrices=False)
USERS, ITEMS = LEFT_VECTORS[:, :6] * VALUES[:6], RIGHT[:6].T
"""Vectors that fit the clicks."""


@dataclass
class LightFM:
    """Stand-in with LightFM's two methods; its numbers are those of the clicks, and biases drawn."""

    user_biases: np.ndarray = field(default_factory=lambda: drawn(len(USERS)))
    item_biases: np.ndarray = field(default_factory=lambda: drawn(len(ITEMS)))
    is_fitted: bool = True

    def get_user_representations(self, features=None):
        return self._of(USERS, self.user_biases, features)

    def get_item_representations(self, features=None):
        return self._of(ITEMS, self.item_biases, features)

    def _of(self, rows, biases, features):
        if not self.is_fitted:
            raise ValueError("You must fit the model before trying to obtain predictions.")
        if features is None:
            return biases.astype(np.float32), rows.astype(np.float32)
        return features @ biases.astype(np.float32), features @ rows.astype(np.float32)


def drawn(count):
    return np.random.default_rng(count).normal(0.3, 0.2, count)


def assert_lists(folder, scores):
    top_items = lists(folder, user_vectors(folder), HISTORIES, 20)
    assert np.array_equal(top_items, ranking(scores, HISTORIES, 20))


class TestLightFM:
    def test_lists_are_those_of_predict(self, tmp_path):
        model = LightFM()

        report = from_lightfm(model, CLICKS, to=tmp_path / "out")

        scores = USERS @ ITEMS.T + model.item_biases + model.user_biases[:, None]
        assert_lists(tmp_path / "out", scores)
        predicted_scores = user_vectors(tmp_path / "out") @ item_vectors(tmp_path / "out").T
        np.testing.assert_allclose(predicted_scores, scores, atol=1e-5)
        assert report.dims == 8 and report.model == "LightFM"

    def test_a_stranger_gets_the_items_biases_and_no_users(self, tmp_path):
        from_lightfm(LightFM(), CLICKS, to=tmp_path / "out")

        vectors = folded(tmp_path / "out", HISTORIES)
        assert (vectors[:, 6] == 1).all() and not vectors[:, 7].any()

    def test_features_make_vectors(self, tmp_path):
        features = sp.random(100, 80, 0.1, "csr", np.float32, rng=np.random.default_rng(0))
        clicks = sp.csr_matrix((CLICKS @ features.T > 1.2).astype("f4"))
        model = LightFM()

        from_lightfm(model, clicks, to=tmp_path / "out", item_features=features)

        np.testing.assert_allclose(item_vectors(tmp_path / "out")[:, 6], features @ model.item_biases, rtol=1e-5)

    @pytest.mark.parametrize(("model", "features"), [(LightFM(is_fitted=False), None), (LightFM(), sp.eye(7).tocsr())])
    def test_one_that_does_not_answer_ends_in_one_line(self, tmp_path, model, features):
        with pytest.raises(SourceError, match="call fit first, and give the features") as error:
            from_lightfm(model, CLICKS, to=tmp_path / "out", user_features=features)

        assert "\n" not in error.value.message and not (tmp_path / "out").exists()


class TestScikitLearn:
    @pytest.fixture
    def decomposition(self):
        return pytest.importorskip("sklearn.decomposition")

    def test_lists_of_an_svd_are_its_reconstruction(self, tmp_path, decomposition):
        model = decomposition.TruncatedSVD(8, random_state=0).fit(CLICKS)

        from_sklearn(model, CLICKS, to=tmp_path / "out")

        assert_lists(tmp_path / "out", model.inverse_transform(model.transform(CLICKS)))

    def test_a_stranger_of_an_svd_is_projected_exactly(self, tmp_path, decomposition):
        model = decomposition.TruncatedSVD(8, random_state=0).fit(CLICKS)

        report = from_sklearn(model, CLICKS, to=tmp_path / "out")

        np.testing.assert_allclose(folded(tmp_path / "out", HISTORIES), model.transform(CLICKS), atol=1e-5)
        assert list(report.recalls) == [report.fold_in] == ["the model's own projection"]

    def test_weights_count_for_known_users_and_their_median_for_strangers(self, tmp_path, decomposition):
        weighed = CLICKS.copy()
        weighed.data = np.random.default_rng(0).choice([1.0, 2.0, 2.0, 5.0], weighed.nnz)
        model = decomposition.TruncatedSVD(8, random_state=0).fit(weighed)

        report = from_sklearn(model, weighed, to=tmp_path / "out")

        assert_lists(tmp_path / "out", model.inverse_transform(model.transform(weighed)))
        np.testing.assert_allclose(folded(tmp_path / "out", HISTORIES), 2 * model.transform(CLICKS), atol=1e-5)
        assert "weigh the clicks of an unknown user's history: each counts 2, the median" in report.cannot

    def test_lists_of_a_factorisation_are_its_reconstruction(self, tmp_path, decomposition):
        model = decomposition.NMF(8, random_state=0, max_iter=500).fit(CLICKS)

        report = from_sklearn(model, CLICKS, to=tmp_path / "out")

        assert_lists(tmp_path / "out", model.transform(CLICKS) @ model.components_)
        assert list(report.recalls) == ["mean", "ridge 0.1", "ridge 1", "ridge 10"]

    def test_vectors_at_hand_are_taken(self, tmp_path, decomposition):
        model = decomposition.NMF(8, random_state=0, max_iter=500)
        fitted = model.fit_transform(CLICKS)

        from_sklearn(model, CLICKS, to=tmp_path / "out", user_vectors=fitted)

        np.testing.assert_allclose(user_vectors(tmp_path / "out"), fitted, rtol=1e-6)

    def test_a_table_of_clicks_serves_as_the_matrix(self, tmp_path, decomposition):
        model = decomposition.TruncatedSVD(8, random_state=0).fit(CLICKS)
        pairs = CLICKS.tocoo()
        lines = [f"u{row},i{column}" for row, column in zip(pairs.row, pairs.col, strict=True)]
        (tmp_path / "clicks.csv").write_text("\n".join(["user,item", *lines[::-1]]))
        users, items = [f"u{n}" for n in range(120)], [f"i{n}" for n in range(80)]

        from_sklearn(model, tmp_path / "clicks.csv", to=tmp_path / "out", user_ids=users, item_ids=items)

        assert_lists(tmp_path / "out", model.inverse_transform(model.transform(CLICKS)))

    def test_one_that_was_not_fitted_is_refused(self, tmp_path, decomposition):
        with pytest.raises(SourceError, match="no components_: call fit"):
            from_sklearn(decomposition.NMF(8), CLICKS, to=tmp_path / "out")

        assert not (tmp_path / "out").exists()

    def test_one_that_centres_is_refused(self, tmp_path, decomposition):
        model = decomposition.PCA(8).fit(CLICKS.toarray())

        with pytest.raises(SourceError, match="PCA is neither TruncatedSVD nor NMF: give the vectors"):
            from_sklearn(model, CLICKS, to=tmp_path / "out")

    def test_another_matrix_ends_in_one_line(self, tmp_path, decomposition):
        model = decomposition.TruncatedSVD(8, random_state=0).fit(CLICKS)

        with pytest.raises(SourceError, match="it is items by users, give its transpose"):
            from_sklearn(model, CLICKS.T, to=tmp_path / "out", user_ids=range(120))


@dataclass
class Dataset:
    """Stand-in for RecTools' Dataset; 2 users and 1 item at the end never clicked."""

    user_features: object = None
    item_features: object = None
    user_id_map = SimpleNamespace(external_ids=np.array([f"u{n}" for n in range(122)]))
    item_id_map = SimpleNamespace(external_ids=np.arange(1000, 1081))

    def get_user_item_matrix(self, include_weights=True):
        return CLICKS.copy()


@dataclass
class Wrapper:
    """Stand-in for a RecTools model."""

    users: np.ndarray
    items: np.ndarray
    u2i_dist: object = field(default_factory=lambda: SimpleNamespace(name="DOT"))
    model: object = None

    def get_vectors(self):
        return self.users, self.items


class WrapperOfDataset(Wrapper):
    def get_vectors(self, dataset, add_biases=True):  # type: ignore[override]
        if not isinstance(dataset, Dataset):
            raise ValueError("not fitted\non this")
        return self.users, self.items


class TestRecTools:
    @pytest.mark.parametrize("kind", [Wrapper, WrapperOfDataset])
    def test_lists_are_those_of_its_vectors(self, tmp_path, kind):
        report = from_rectools(kind(USERS, ITEMS), Dataset(), to=tmp_path / "out")

        assert_lists(tmp_path / "out", USERS @ ITEMS.T)
        assert report.model == f"RecTools {kind.__name__}" and report.users == 120

    def test_who_never_clicked_comes_along_where_it_has_a_vector(self, tmp_path):
        users, items = np.vstack([USERS, USERS[:2]]), np.vstack([ITEMS, ITEMS[:1]])

        report = from_rectools(WrapperOfDataset(users, items), Dataset(), to=tmp_path / "out")

        assert (report.users, report.items, report.clicks) == (122, 81, CLICKS.nnz)

    def test_distance_ranks_as_distance_does(self, tmp_path):
        rng = np.random.default_rng(0)
        items = ITEMS + rng.normal(0, 0.05, ITEMS.shape)
        near = SimpleNamespace(name="EUCLIDEAN")

        report = from_rectools(Wrapper(USERS, items, near), Dataset(), to=tmp_path / "out")

        apart = np.linalg.norm(USERS[:, None] - items[None], axis=2)
        assert_lists(tmp_path / "out", -apart)
        assert any(limitation.startswith("show distances") for limitation in report.cannot)

    @pytest.mark.parametrize(("features", "has_own_fold_in"), [(None, True), ("a table", False)])
    def test_als_keeps_its_own_fold_in_without_features(self, tmp_path, features, has_own_fold_in):
        inner = SimpleNamespace(
            user_factors=USERS.astype("f4"), item_factors=ITEMS.astype("f4"), alpha=1.0, regularization=0.1
        )  # fmt: skip
        model = Wrapper(USERS, ITEMS, model=inner)

        report = from_rectools(model, Dataset(item_features=features), to=tmp_path / "out")

        assert (report.fold_in == "the model's own equations") is has_own_fold_in
        assert_lists(tmp_path / "out", USERS @ ITEMS.T)

    @pytest.mark.parametrize(
        ("model", "message_pattern"),
        [
            (SimpleNamespace(), "no get_vectors: for EASE call from_item_weights with model.weight.T"),
            (Wrapper(USERS, ITEMS, SimpleNamespace(name="COSINE")), "ranks by COSINE"),
            (WrapperOfDataset(USERS, ITEMS), "not fitted on this; call fit first"),
        ],
    )
    def test_others_end_in_one_line(self, tmp_path, model, message_pattern):
        dataset = SimpleNamespace() if "fit" in message_pattern else Dataset()

        with pytest.raises(SourceError, match=message_pattern) as error:
            from_rectools(model, dataset, to=tmp_path / "out")

        assert "\n" not in error.value.message and not (tmp_path / "out").exists()
