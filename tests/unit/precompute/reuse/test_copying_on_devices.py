"""Nights that copy, on a GPU: nothing of a model that runs there is copied."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from precompute.reuse import reproducibility
from precompute.scoring.towers import DeviceTower


@pytest.mark.parametrize(("device", "is_alike"), [("cuda:0", False), (None, True)])
def test_rows_are_alike_on_the_processor_alone(
    monkeypatch: pytest.MonkeyPatch, device: str | None, is_alike: bool
) -> None:
    # Given a model whose rows do not depend on other rows, as far as a sample shows
    tower: Any = SimpleNamespace(
        spec=SimpleNamespace(inputs=[]), run=lambda inputs: np.zeros((len(inputs["row"]), 2), "f4")
    )

    def opened(_build: object, model: Any, on: str | None) -> Any:
        return tower if on is None else DeviceTower(model.name, tower, tower)

    features = SimpleNamespace(of=lambda rows: ({}, np.ones(len(rows), np.bool_)))
    monkeypatch.setattr(reproducibility, "open_tower", opened)
    monkeypatch.setattr(reproducibility, "_read_sample_users", lambda _: None)
    monkeypatch.setattr(reproducibility, "open_item_features", lambda *_: features)
    monkeypatch.setattr(reproducibility, "item_inputs", lambda *given: ({"row": given[-1]}, None))
    monkeypatch.setattr(DeviceTower, "run", lambda _, inputs: tower.run(inputs))
    model = SimpleNamespace(name="item_tower", entity="item", digest="1", spec=None)
    base: Any = SimpleNamespace(has_model=lambda _: True)
    bundle: Any = SimpleNamespace(models=[model])
    build: Any = None
    items: Any = SimpleNamespace(count=9)

    alike_by_model = reproducibility.find_regrouped_alike(build, base, bundle, items, device)

    assert alike_by_model == {"item_tower": is_alike}
