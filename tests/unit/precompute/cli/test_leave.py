"""The end of a command whose gate is left behind in native code: its own exit code, and no abort."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, threading, time
import numpy as np, onnxruntime
from onnx import TensorProto, helper
from precompute.__main__ import end_program

weights = helper.make_tensor("w", TensorProto.FLOAT, [64, 64], [0.5] * 4096)
values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy"]
nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weights])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString())
inputs = {"x": np.ones((200_000, 64), np.float32)}
begun = threading.Event()

def gate():
    while True:
        begun.set()
        session.run(None, inputs)

threading.Thread(target=gate, daemon=True).start()
begun.wait()
print("told", end="")
end_program(130)
"""


def test_a_gate_that_is_left_behind_in_a_model_aborts_nothing() -> None:
    """Python ended its thread within C++: "terminate called without an active exception", SIGABRT."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "told", "")
