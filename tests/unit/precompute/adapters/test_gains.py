"""What an input of users adds to the ranks of held-out clicks: refused if less than nothing, said if not shown."""

import numpy as np
import pytest

from cache.errors import SourceError
from precompute.adapters.fold_in import InputGain

RNG = np.random.default_rng(0)
WITHOUT = RNG.uniform(0.4, 0.9, 500)
NOISE = RNG.normal(0, 0.1, 500)


def test_a_gain_beyond_its_error_asks_nothing() -> None:
    assert InputGain("history", WITHOUT + 0.05 + NOISE, WITHOUT).limit_texts() == []


@pytest.mark.parametrize(("name", "ids"), [("history", "item_ids"), ("user_features", "user_ids")])
def test_no_gain_is_said_and_a_loss_refused(name: str, ids: str) -> None:
    (limit,) = InputGain(name, WITHOUT + NOISE - NOISE.mean(), WITHOUT).limit_texts()
    assert f"tell whether {ids} are in the order" in limit

    with pytest.raises(SourceError, match=f"give all {ids} in the order"):
        InputGain(name, WITHOUT - 0.05 + NOISE, WITHOUT).limit_texts()
