"""The reference model as `torch.export` programs, equal to the ONNX models of `graphs`. Needs torch (extra `gpu`)."""

import io
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class _ItemTower(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    def __init__(self, item_vectors: NDArray[np.float32]) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.from_numpy(np.ascontiguousarray(item_vectors)))

    def forward(self, item_index: Tensor) -> Tensor:
        return self.table[item_index]


class _HistoryTower(_ItemTower):
    def forward(self, history: Tensor) -> Tensor:
        return self.table[history].sum(dim=1)


class _AffinityModel(_HistoryTower):
    def __init__(self, history_rows: NDArray[np.float32], centroids: NDArray[np.float32]) -> None:
        super().__init__(history_rows)
        self.centroids = nn.Buffer(torch.from_numpy(np.ascontiguousarray(centroids.T)))

    def forward(self, history: Tensor) -> Tensor:
        summed = super().forward(history)
        # Unlike `normalize`, this has no minimum length: an empty history stays a zero vector, as in the ONNX model.
        length = summed.square().sum(dim=1, keepdim=True).sqrt()
        direction = summed / torch.where(length > 0, length, torch.ones_like(length))
        return torch.softmax(direction @ self.centroids, dim=1)


def history_tower(history_rows: NDArray[np.float32]) -> bytes:
    """Return a program: history int32 [n, length] -> [n, dims]."""
    return _export_program(_HistoryTower(history_rows), 2)


def item_tower(item_vectors: NDArray[np.float32]) -> bytes:
    """Return a program: item_index int32 [n] -> [n, dims]."""
    return _export_program(_ItemTower(item_vectors), 1)


def affinity_model(history_rows: NDArray[np.float32], centroids: NDArray[np.float32]) -> bytes:
    """Return a program: history int32 [n, length] -> probabilities [n, centroids]."""
    return _export_program(_AffinityModel(history_rows, centroids), 2)


def _export_program(module: nn.Module, axis_count: int) -> bytes:
    """Return the serialised `torch.export` program of a module, for any number of rows and any length."""
    example_input = torch.zeros((3, 5)[:axis_count], dtype=torch.int32)
    dynamic_shapes: Sequence[dict[int, object]] = [dict.fromkeys(range(axis_count), torch.export.Dim.DYNAMIC)]
    program = torch.export.export(module.eval(), (example_input,), dynamic_shapes=tuple(dynamic_shapes))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()
