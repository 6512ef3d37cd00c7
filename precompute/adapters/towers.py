"""User towers that fold a history in, as ONNX graphs. Pure.

With Z the rows of a history's items, x is what `steps` steps of conjugate gradients (Hestenes and Stiefel, 1952) from 0
make of (I + strength Z'Z) x = Z'1, and the vector is x B + offset. Without strength one step is exact, and x is the sum
of the rows. With Z = Y W, W = (Y'Y + reg I)^-1/2, strength c - 1 and B = c W, the vector is that of ALS for implicit
feedback (Hu, Koren and Volinsky, ICDM 2008) with confidence c. Every product has one row of the batch in it, so that an
answer does not depend on the rows beside it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, helper

from precompute.bundles.graphs import floats, ints, model_of
from precompute.bundles.onnx_model import OnnxModel

TINY = np.float32(1e-30)
"""Keeps 0 / 0 from being no number: a row that is solved stays as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Fold of a history: `rows` float32 [items, dims], `back` [dims, dims] (None: as it is), `offset` [dims].

    `is_mean`: divided by the length of the history.
    """

    name: str
    rows: NDArray[np.float32]
    strength: float
    back: NDArray[np.float32] | None
    offset: NDArray[np.float32]
    is_mean: bool = False

    def exact(self, items: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [dims]: the vector of a history, solved directly."""
        rows = self.rows[items].astype(np.float64)
        square = np.eye(rows.shape[1]) + self.strength * rows.T @ rows
        solved: NDArray[np.float64] = np.linalg.solve(square, rows.sum(axis=0))
        if self.is_mean:
            solved /= max(len(items), 1)
        turned = solved if self.back is None else solved @ self.back.astype(np.float64)
        return turned + self.offset.astype(np.float64)

    def tower(self, steps: int) -> OnnxModel:
        """history int32 [n, length] -> vector float32 [n, dims]; the number of the items is the padding."""
        table = np.concatenate([self.rows, np.zeros((1, self.rows.shape[1]), np.float32)])
        constants: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {
            "table": table,
            "offset": self.offset,
            "middle": np.array([1], np.int64),
            "real": np.concatenate([np.ones(len(self.rows), np.float32), np.zeros(1, np.float32)]),
        }
        nodes = [
            helper.make_node("Gather", ["table", "history"], ["rows"], axis=0),
            helper.make_node("Gather", ["real", "history"], ["here"], axis=0),
            helper.make_node("Unsqueeze", ["here", "middle"], ["ones"]),
            helper.make_node("MatMul", ["ones", "rows"], ["target"]),
        ]
        if self.strength:
            constants |= {"strength": np.array(self.strength, np.float32), "tiny": np.array(TINY)}
            nodes += [helper.make_node("Transpose", ["rows"], ["columns"], perm=[0, 2, 1])]
            nodes += _conjugate_gradients(steps)
            last = f"x{steps}"
        else:
            last = "target"
        if self.is_mean:
            # A sum of ones is exact in any order.
            constants["one"] = np.array(1, np.float32)
            nodes += [
                helper.make_node("ReduceSum", ["here", "middle"], ["length"], keepdims=1),
                helper.make_node("Max", ["length", "one"], ["at_least_one"]),
                helper.make_node("Unsqueeze", ["at_least_one", "middle"], ["tall_length"]),
                helper.make_node("Div", [last, "tall_length"], ["mean"]),
            ]
            last = "mean"
        if self.back is not None:
            # From the left: a constant on the right would become int8, which so small a product does not repay.
            constants["back"] = np.ascontiguousarray(self.back.T)
            nodes += [
                helper.make_node("Transpose", [last], ["column"], perm=[0, 2, 1]),
                helper.make_node("MatMul", ["back", "column"], ["turned"]),
                helper.make_node("Transpose", ["turned"], ["row"], perm=[0, 2, 1]),
            ]
            last = "row"
        nodes += [helper.make_node("Squeeze", [last, "middle"], ["flat"])]
        nodes += [helper.make_node("Add", ["flat", "offset"], ["vector"])]
        return model_of(
            nodes,
            [ints("history", ["rows_of_batch", "length_of_history"])],
            [floats("vector", self.rows.shape[1])],
            constants,
        )


def _conjugate_gradients(steps: int) -> list[NodeProto]:
    """Nodes from `rows`, `columns` and `target` to `x1`, `x2` and so on, from x0 = 0."""
    nodes = [
        helper.make_node("Sub", ["target", "target"], ["x0"]),
        helper.make_node("Identity", ["target"], ["r0"]),
        helper.make_node("Identity", ["target"], ["p0"]),
        *_dot("r0", "r0", "rr0"),
    ]
    for step in range(steps):
        previous_step, after = str(step), str(step + 1)
        nodes += [
            helper.make_node("MatMul", [f"p{previous_step}", "columns"], [f"along{previous_step}"]),
            helper.make_node(
                "MatMul", [f"along{previous_step}", "rows"], [f"square{previous_step}"]
            ),
            helper.make_node(
                "Mul", [f"square{previous_step}", "strength"], [f"weighed{previous_step}"]
            ),
            helper.make_node(
                "Add", [f"weighed{previous_step}", f"p{previous_step}"], [f"ap{previous_step}"]
            ),
            *_dot(f"p{previous_step}", f"ap{previous_step}", f"pap{previous_step}"),
            *_ratio(f"rr{previous_step}", f"pap{previous_step}", f"alpha{previous_step}"),
            *_moved(
                f"x{previous_step}",
                f"alpha{previous_step}",
                f"p{previous_step}",
                f"x{after}",
                "Add",
            ),
            *_moved(
                f"r{previous_step}",
                f"alpha{previous_step}",
                f"ap{previous_step}",
                f"r{after}",
                "Sub",
            ),
            *_dot(f"r{after}", f"r{after}", f"rr{after}"),
            *_ratio(f"rr{after}", f"rr{previous_step}", f"beta{previous_step}"),
            *_moved(f"r{after}", f"beta{previous_step}", f"p{previous_step}", f"p{after}", "Add"),
        ]
    return nodes


def _dot(left_name: str, right_name: str, output_name: str) -> list[NodeProto]:
    return [
        helper.make_node("Transpose", [right_name], [f"{output_name}_column"], perm=[0, 2, 1]),
        helper.make_node("MatMul", [left_name, f"{output_name}_column"], [output_name]),
    ]


def _ratio(above: str, below: str, output_name: str) -> list[NodeProto]:
    return [
        helper.make_node("Max", [below, "tiny"], [f"{output_name}_below"]),
        helper.make_node("Div", [above, f"{output_name}_below"], [output_name]),
    ]


def _moved(start: str, by: str, along: str, output_name: str, how: str) -> list[NodeProto]:
    return [
        helper.make_node("Mul", [by, along], [f"{output_name}_step"]),
        helper.make_node(how, [start, f"{output_name}_step"], [output_name]),
    ]
