"""Features of users as a generation publishes them: each column by itself."""

from itertools import pairwise

import numpy as np
import orjson
import pyarrow as pa

from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.scoring.user_reading import feature_json_rows


def test_a_value_that_cannot_be_used_costs_no_other() -> None:
    inputs = (
        InputSpec("age", "feature", "int32", column="age"),
        InputSpec("share", "feature", "float32", column="age"),
        InputSpec("home", "feature", "string", column="home"),
        InputSpec("taste", "feature", "float32", column="taste", width=2),
    )
    columns = {
        "age": pa.array([7, None, 2**40, 1, None]),
        "home": pa.array(["x", "y", None, "z", None]),
        "taste": pa.array([[0.5, 1.0], [1.0], [2.0, 4.0], [1.0, 1.0], None], pa.list_(pa.float64())),
    }  # fmt: skip
    published = np.array([True, True, True, False, True])

    feature_json = feature_json_rows(TowerSpec(inputs, "vector", 2), columns, published)

    ends = feature_json.indptr.tolist()
    rows = [feature_json.indices[start:end].tobytes() for start, end in pairwise(ends)]
    assert [orjson.loads(row) if row else None for row in rows] == [
        {"age": 7, "home": "x", "taste": [0.5, 1.0]},
        {"home": "y"},
        {"age": float(2**40), "taste": [2.0, 4.0]},
        None,
        None,
    ]
