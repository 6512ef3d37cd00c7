"""Models whose scores are products of vectors, or of a history and weights of items by items."""

from importlib import import_module
from typing import Any

import numpy as np
import scipy.sparse as sp

from precompute.adapters.factorisations import from_implicit, from_lightfm, from_rectools, from_sklearn
from precompute.adapters.item_weights import ease, from_item_weights
from tests.bench.fitted.cut import ITEMS, TOP, USERS, Cut
from tests.bench.fitted.fitted import Fitted

FACTORS = 32


def als(cut: Cut) -> Fitted:
    """Alternating least squares of implicit."""
    model = import_module("implicit.als").AlternatingLeastSquares(
        factors=FACTORS, regularization=1.0, alpha=10.0, random_state=0, num_threads=1
    )
    return _implicit(model, cut)


def bpr(cut: Cut) -> Fitted:
    """Bayesian personalised ranking of implicit."""
    model = import_module("implicit.bpr").BayesianPersonalizedRanking(
        factors=FACTORS, iterations=150, random_state=0, num_threads=1
    )
    return _implicit(model, cut)


def lmf(cut: Cut) -> Fitted:
    """Logistic matrix factorisation of implicit."""
    model = import_module("implicit.lmf").LogisticMatrixFactorization(factors=FACTORS, random_state=0, num_threads=1)
    return _implicit(model, cut)


def _implicit(model: Any, cut: Cut) -> Fitted:
    clicks = cut.matrix
    with import_module("threadpoolctl").threadpool_limits(1, "blas"):  # implicit warns of more
        model.fit(clicks, show_progress=False)
    return Fitted(
        lambda to: from_implicit(model, clicks, to=to),
        lambda: np.asarray(
            model.recommend(
                cut.evaluated_users, clicks[cut.evaluated_users], N=TOP, filter_already_liked_items=True
            )[0],
            np.int64,
        ),
    )  # fmt: skip


def truncated_svd(cut: Cut) -> Fitted:
    """TruncatedSVD of scikit-learn."""
    model = import_module("sklearn.decomposition").TruncatedSVD(FACTORS, random_state=0)
    return _sklearn(model, cut)


def nmf(cut: Cut) -> Fitted:
    """NMF of scikit-learn."""
    model = import_module("sklearn.decomposition").NMF(FACTORS, init="nndsvd", random_state=0)
    return _sklearn(model, cut)


def _sklearn(model: Any, cut: Cut) -> Fitted:
    clicks = cut.matrix
    model.fit(clicks)

    def scores() -> Any:
        return model.inverse_transform(model.transform(clicks[cut.evaluated_users]))

    return Fitted(lambda to: from_sklearn(model, clicks, to=to), lambda: cut.rank_items(scores()))


def ease_weights(cut: Cut) -> Fitted:
    """EASE, a closed form."""
    return _weights(ease(cut.matrix, regularization=200.0), cut)


def slim(cut: Cut) -> Fitted:
    """SLIM: an elastic net for each item, weights of at least 0 (Ning and Karypis, ICDM 2011)."""
    net = import_module("sklearn.linear_model").ElasticNet(
        alpha=2e-3, l1_ratio=0.5, positive=True, fit_intercept=False, max_iter=500, tol=1e-3,
        precompute=True, selection="cyclic",
    )  # fmt: skip
    clicks = cut.matrix.toarray().astype(np.float64)
    gram = clicks.T @ clicks
    weights = np.zeros((ITEMS, ITEMS), np.float32)
    for item in range(ITEMS):
        column, gram_row = clicks[:, item].copy(), gram[item].copy()
        clicks[:, item] = gram[item] = gram[:, item] = 0  # not from itself
        net.set_params(precompute=gram).fit(clicks, column, check_input=False)
        weights[:, item] = net.coef_
        clicks[:, item], gram[item], gram[:, item] = column, gram_row, gram_row
    return _weights(sp.csr_matrix(weights), cut)


def _weights(weights: Any, cut: Cut) -> Fitted:
    clicks = cut.matrix

    def scores() -> Any:
        user_scores = clicks[cut.evaluated_users] @ weights
        return user_scores.toarray() if sp.issparse(user_scores) else user_scores

    return Fitted(lambda to: from_item_weights(weights, clicks, to=to), lambda: cut.rank_items(scores()))


def warp(cut: Cut) -> Fitted:
    """LightFM by weighted approximate-rank pairwise loss, with biases."""
    clicks = cut.matrix
    model = import_module("lightfm").LightFM(FACTORS, loss="warp", random_state=0)
    model.fit(clicks, epochs=20)

    def scores() -> Any:
        users, items = (np.repeat(cut.evaluated_users, ITEMS), np.tile(np.arange(ITEMS), len(cut.evaluated_users)))
        return model.predict(users, items).reshape(-1, ITEMS)

    return Fitted(lambda to: from_lightfm(model, clicks, to=to), lambda: cut.rank_items(scores()))


def pure_svd(cut: Cut) -> Fitted:
    """PureSVD of RecTools, asked as RecTools is: by its Dataset and `recommend`."""
    frame = import_module("pandas").DataFrame(cut.rows(), columns=["user_id", "item_id", "datetime"])
    frame["weight"] = 1.0
    dataset = import_module("rectools.dataset").Dataset.construct(frame)
    model = import_module("rectools.models").PureSVDModel(factors=FACTORS)
    model.fit(dataset)

    def lists() -> Any:
        recommendations = model.recommend(cut.evaluated_users, dataset, k=TOP, filter_viewed=True)
        order = recommendations.sort_values(["user_id", "rank"])
        return order["item_id"].to_numpy(np.int64).reshape(len(cut.evaluated_users), TOP)

    assert dataset.user_id_map.size == USERS
    return Fitted(lambda to: from_rectools(model, dataset, to=to), lists)
