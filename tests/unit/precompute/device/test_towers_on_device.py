"""Towers on a device: how far they may be from the processor's, and that the gates allow what they may be."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.errors import BundleError, ModelFailed
from cache.model.runtime import Accelerator, ort
from cache.model.tower import Histories, Tile, Tower
from cache.records import NO_ITEM, Layout
from cache.topk.topk import Scorer
from precompute.gates.rules import exact
from precompute.scoring import towers
from precompute.scoring.towers import DEVICE_AGREEMENT, DEVICE_LENGTH_AGREEMENT, DeviceTower, OnnxOnGpu

DIMS = 48
K = 30


class FixedTower:
    """A tower that gives row after row of some vectors."""

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self.vectors = vectors
        self.spec: Any = SimpleNamespace(output_dims=vectors.shape[1], inputs=[SimpleNamespace(name="row")])

    def run(self, inputs: Any) -> NDArray[np.float32]:
        row_vectors: NDArray[np.float32] = self.vectors[inputs["row"]]
        return row_vectors

    def batches(self, inputs: Any, tile: Tile) -> Any:
        for start in range(0, len(inputs["row"]), tile.rows_max):
            rows = np.arange(len(inputs["row"]))[start : start + tile.rows_max]
            yield rows, {"row": inputs["row"][rows]}

    def outputs(self, feeds: Any) -> Any:
        for (rows,) in feeds:
            yield self.vectors[rows]


def on_device(
    processor_vectors: NDArray[np.float32], device_vectors: NDArray[np.float32], name: str = "user_tower"
) -> NDArray[np.float32]:
    """What the night takes of a device that finds other vectors; raises where it takes none."""
    tower: Any = FixedTower(processor_vectors)
    rows = np.arange(len(processor_vectors))
    return DeviceTower(name, tower, FixedTower(device_vectors)).run({"row": rows})


def off_by(vectors: NDArray[np.float32], towards: NDArray[np.float32], length_share: float) -> NDArray[np.float32]:
    """Vectors moved by a share of their length in the direction of others."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    direction = towards / np.linalg.norm(towards, axis=1, keepdims=True)
    return np.asarray(vectors + length_share * lengths * direction, np.float32)


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@pytest.mark.parametrize("seed", range(3))
def test_a_tower_at_the_edge_of_its_tolerance_passes_the_gate_of_lists(metric: Any, seed: int) -> None:
    # Given items in pairs of close neighbours, and vectors moved in the direction that changes their order most
    rng = np.random.default_rng(seed)
    users = rng.standard_normal((64, DIMS)).astype(np.float32)
    half = rng.standard_normal((400, DIMS)).astype(np.float32)
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    apart = rng.standard_normal((400, DIMS)).astype(np.float32)
    items = np.concatenate([half, half + 2e-5 * apart / np.linalg.norm(apart, axis=1)[:, None]])
    best_ordinals = Scorer.of(items, metric, engine=False).top(users, 1)[0][:, 0].astype(np.int64)
    moved = off_by(users, items[(best_ordinals + 400) % 800] - items[best_ordinals], 0.98 * DEVICE_LENGTH_AGREEMENT)
    moved[::2] = users[::2]  # half of them by the processor

    tower_outputs = on_device(users, moved)
    ordinals, scores = Scorer.of(items, metric, engine=False).top(tower_outputs, K)

    counts = (ordinals != NO_ITEM).sum(axis=1)
    right = exact._check_lists_best(
        users.astype(np.float64), items, Histories.of([()] * len(users)), ordinals, counts,
        scores.astype(np.float64), Layout("topk", K, "f4"), metric,
    )  # fmt: skip
    processor_ordinals = Scorer.of(items, metric, engine=False).top(users, K)[0]
    assert right.all() and not np.array_equal(processor_ordinals, ordinals)


def test_the_gates_allow_what_a_device_may_be_off() -> None:
    worst_sum = DIMS * 2.0**-24
    assert 2 * DEVICE_LENGTH_AGREEMENT + worst_sum <= exact.SCORE_ROUNDING
    assert DEVICE_AGREEMENT <= exact.OUTPUT_ROUNDING


@pytest.mark.parametrize(
    ("name", "length_share", "is_taken"),
    [
        ("user_tower", 0.9 * DEVICE_LENGTH_AGREEMENT, True),
        ("user_tower", 1.2 * DEVICE_LENGTH_AGREEMENT, False),
        ("item_tower", 1.2 * DEVICE_LENGTH_AGREEMENT, True),
        ("item_tower", 8 * DEVICE_AGREEMENT, False),
    ],
)
def test_a_tower_beyond_its_tolerance_is_refused_before_it_scores(
    name: str, length_share: float, is_taken: bool
) -> None:
    rng = np.random.default_rng(3)
    vectors = 7 * rng.standard_normal((20, DIMS)).astype(np.float32)
    largest = np.eye(DIMS, dtype=np.float32)[np.abs(vectors).argmax(axis=1)]
    scale = 1.0 if name == "user_tower" else 1 / np.sqrt(DIMS)  # a length is many numbers
    moved = off_by(vectors, largest, length_share * scale)

    if is_taken:
        assert np.array_equal(on_device(vectors, moved, name), moved)
    else:
        with pytest.raises(BundleError, match=f"{name} on the device differs"):
            on_device(vectors, moved, name)


@pytest.mark.parametrize("non_finite", [np.nan, np.inf])
def test_rows_that_are_finite_on_neither_are_no_disagreement(non_finite: float) -> None:
    vectors = np.random.default_rng(5).standard_normal((20, DIMS)).astype(np.float32)
    vectors[5, 3] = non_finite
    assert np.array_equal(on_device(vectors, vectors), vectors, equal_nan=True)

    finite_vectors = vectors.copy()
    finite_vectors[5, 3] = 1
    for processor_vectors, device_vectors in ((vectors, finite_vectors), (finite_vectors, vectors)):
        with pytest.raises(BundleError, match="differs from its ONNX file on the processor by nan"):
            on_device(processor_vectors, device_vectors)


def test_a_device_without_room_is_compared_when_it_has_some() -> None:
    vectors = np.random.default_rng(6).standard_normal((20, DIMS)).astype(np.float32)
    moved, is_full = off_by(vectors, vectors, 8 * DEVICE_AGREEMENT), True

    class Running(FixedTower):
        def outputs(self, feeds: Any) -> Any:
            if is_full:
                raise MemoryError("no room")
            yield from super().outputs(feeds)

    processor_tower: Any = FixedTower(vectors)
    tower = DeviceTower("user_tower", processor_tower, Running(moved))
    rows: Any = {"row": np.arange(20)}

    assert np.array_equal(tower.run(rows), vectors)
    is_full = False
    with pytest.raises(BundleError, match="user_tower on the device differs"):
        tower.run(rows)


def test_a_tower_whose_device_fails_goes_on_on_the_processor(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch", reason="a device's errors are torch's: make torch-env")
    vectors = np.random.default_rng(7).standard_normal((20, DIMS)).astype(np.float32)
    errors = [torch.AcceleratorError("CUDA error: unspecified launch failure"), RuntimeError("odd")]

    class Running(FixedTower):
        def outputs(self, feeds: Any) -> Any:
            yield from super().outputs(feeds)
            raise errors[0]

    processor_tower: Any = FixedTower(vectors)
    tower = DeviceTower("user_tower", processor_tower, Running(vectors))
    rows: Any = {"row": np.arange(20)}

    assert all(np.array_equal(tower.run(rows), vectors) for _ in range(2))
    assert caplog.text.count("user_tower stays on the processor: CUDA error") == 1
    errors.pop(0)
    with pytest.raises(RuntimeError, match="odd"):
        DeviceTower("user_tower", processor_tower, Running(vectors)).run(rows)


@pytest.mark.parametrize(
    ("device", "program", "may_stay"), [("auto", None, True), ("auto", "a program", False), ("cuda", None, False)]
)
def test_an_unrequested_form_that_is_off_leaves_the_model_to_the_processor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, program: str | None, may_stay: bool
) -> None:
    vectors = np.random.default_rng(4).standard_normal((20, DIMS)).astype(np.float32)
    moved = off_by(vectors, vectors, 8 * DEVICE_AGREEMENT)
    processor_tower = FixedTower(vectors)
    monkeypatch.setattr(towers, "fetch_model", lambda *_: None)
    monkeypatch.setattr(towers, "_open_on_device", lambda *_: FixedTower(moved))
    monkeypatch.setattr(Tower, "open", lambda *_, **__: processor_tower)
    build: Any = SimpleNamespace(config=SimpleNamespace(device=device, threads=1))
    model: Any = SimpleNamespace(name="item_tower", program_path=program, spec=processor_tower.spec)
    tower = towers.open_tower(build, model, "cuda:0")
    rows: Any = {"row": np.arange(20)}

    if not may_stay:
        with pytest.raises(BundleError, match="differs"):
            tower.run(rows)
        return
    assert all(np.array_equal(tower.run(rows), vectors) for _ in range(2))
    assert caplog.text.count("item_tower stays on the processor: item_tower on the device differs") == 1


def test_a_model_without_a_program_stays_on_the_processor_where_onnx_runtime_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    model: Any = SimpleNamespace(name="user_tower", program_path=None)
    build: Any = SimpleNamespace(config=SimpleNamespace(device_tasks=1))
    monkeypatch.setattr(towers, "limit_gpu_memory", lambda *_: 0)

    refusal_reason = towers._open_on_device(build, model, "cuda:0")

    assert isinstance(refusal_reason, str) and "install onnxruntime-gpu" in refusal_reason
    assert "cpu is not a GPU" in str(towers._open_on_device(build, model, "cpu"))


def test_models_without_a_program_and_torch_share_a_tasks_memory_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = SimpleNamespace(models=[SimpleNamespace(program_path=program) for program in (None, None, "p", None)])
    opened: list[Accelerator] = []

    def record_open(_path: Any, spec: Any, *, accelerator: Accelerator) -> Any:
        opened.append(accelerator)
        return SimpleNamespace(provider="cuda", spec=spec)

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(towers, "open_bundle", lambda _: bundle)
    monkeypatch.setattr(towers, "fetch_model", lambda *_: None)
    monkeypatch.setattr(towers, "limit_gpu_memory", lambda _, tasks: (24 << 30) // tasks)
    monkeypatch.setattr(Tower, "open", record_open)
    build: Any = SimpleNamespace(config=SimpleNamespace(device_tasks=2))
    model: Any = SimpleNamespace(name="user_tower", program_path=None, spec=SimpleNamespace(inputs=[]))

    assert isinstance(towers._open_on_device(build, model, "cuda:1"), OnnxOnGpu)
    assert opened == [Accelerator("cuda", 1, 3 << 30)]  # two tasks, each of three models and torch


def test_the_onnx_file_on_a_gpu_says_when_its_memory_is_full() -> None:
    class FailingSession:
        def run(self, _names: Any, feed: Any) -> Any:
            raise RuntimeError(bytes(feed["row"]).decode())

    tower = Tower.__new__(Tower)
    tower.name, tower._session = "user_tower", FailingSession()
    tower.spec = SimpleNamespace(inputs=[SimpleNamespace(name="row")], output="vector")  # type: ignore[assignment]

    def outputs(message: bytes) -> None:
        list(OnnxOnGpu(tower).outputs([[np.frombuffer(message, np.uint8)]]))

    with pytest.raises(MemoryError):
        outputs(b"Failed to allocate memory for requested buffer")
    with pytest.raises(ModelFailed, match="Invalid rank"):
        outputs(b"Invalid rank")


def test_providers_are_named_with_their_device_and_share() -> None:
    cuda, processor = Accelerator("cuda", 1, 5).session_providers()
    assert cuda == (
        "CUDAExecutionProvider", {"device_id": 1, "use_tf32": 0, "gpu_mem_limit": 5},
    )  # fmt: skip
    assert processor == "CPUExecutionProvider"
    assert [provider[0] for provider in Accelerator("tensorrt").session_providers()[:2]] == [
        "TensorrtExecutionProvider",
        "CUDAExecutionProvider",
    ]
