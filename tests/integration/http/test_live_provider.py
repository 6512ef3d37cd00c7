"""Live models on a GPU that this ONNX Runtime cannot use: a reason wherever one looks, and the same answers."""

import logging
from typing import Any

import pytest

from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.model.predictor import ModelPrecision, Predictor, open_predictor
from cache.model.runtime import Accelerator, ort
from cache.model.tower import Tower
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.store.releases import newest_release
from infra.cli.check import CHECK_BY_SUBJECT
from precompute.config.settings import NightConfig
from tests.integration.nights import build_night, histories
from tests.integration.serving_app import serving


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])


Opened = tuple[Predictor | None, str | None, str | None]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("provider"), redis_url)


@pytest.fixture(scope="module")
def live(night: NightConfig) -> tuple[ArtefactStore, Manifest]:
    store = night.store()
    release = newest_release(store)
    assert release is not None
    return store, read_manifest(store, release.generation)


def opened(
    live: tuple[ArtefactStore, Manifest], accelerator: Accelerator, precision: ModelPrecision = "fp32"
) -> Opened:
    store, manifest = live
    items = ItemTable.open(store.local(generation_path(manifest.generation)), manifest)
    return open_predictor(store, manifest, items, precision, 1, (), accelerator)


async def test_a_provider_that_is_not_there_is_reported_and_answers_stay(
    night: NightConfig, caplog: pytest.LogCaptureFixture
) -> None:
    history = next(iter(histories(night).values()))
    answers = {}
    for provider in ("cpu", "cuda", "tensorrt"):
        with caplog.at_level(logging.WARNING):
            async with serving(night, live_provider=provider) as app:
                body = [
                    {"id": f"{provider} {history_start}", "history": history[history_start:]}
                    for history_start in range(3)
                ]
                response = await app.post("/v1/lookup/user_topk", {"entities": body})
                overview = (await app.get("/v1/generations"))["live"]
                gauge = await app.scrape_samples("larder_live_fallback")
        answers[provider] = [(answer["source"], answer["items"], answer["scores"]) for answer in response["answers"]]
        assert {model["provider"] for model in overview["models"].values()} == {"cpu"}
        if provider == "cpu":
            assert overview["fallback"] is None and set(gauge.values()) == {0}
            continue
        assert "install onnxruntime-gpu" in overview["fallback"] and set(gauge.values()) == {1}
        assert "live models run on the processor: ONNX Runtime" in caplog.text
    assert answers["cuda"] == answers["tensorrt"] == answers["cpu"]
    assert {answer[0] for answer in answers["cpu"]} == {"live"}


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_does_not_load_is_reported(
    live: tuple[ArtefactStore, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])

    predictor, degraded, fallback = opened(live, Accelerator("cuda"))

    assert predictor is not None and degraded is None and predictor.provider_by_model["user_tower"] == "cpu"
    assert fallback is not None and "could not load CUDAExecutionProvider" in fallback


def test_int8_models_are_not_said_to_run_on_a_gpu_that_has_few_of_their_operators(
    live: tuple[ArtefactStore, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    accelerators: list[Accelerator | None] = []
    original_open = Tower.open

    def note_and_open(*arguments: Any, accelerator: Accelerator | None = None, **how: Any) -> Tower:
        accelerators.append(accelerator)
        return original_open(*arguments, **how)

    monkeypatch.setattr(Tower, "open", note_and_open)

    predictor, degraded, fallback = opened(live, Accelerator("cuda"), "int8")

    assert predictor is not None and degraded is None and predictor.precisions["user_tower"] == "int8"
    assert accelerators and set(accelerators) == {None}
    assert fallback == "cuda supports few of the operators of int8 models: set precision to fp32"


def test_models_that_fail_on_a_gpu_run_on_the_processor(
    live: tuple[ArtefactStore, Manifest], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original_open = Predictor.open

    def failing(*arguments: Any, accelerator: Accelerator | None, **how: Any) -> Predictor:
        if accelerator is not None:
            raise RuntimeError("CUDA failure 2: out of memory")
        return original_open(*arguments, accelerator=None, **how)

    monkeypatch.setattr(Predictor, "open", failing)

    predictor, degraded, fallback = opened(live, Accelerator("cuda"))

    assert predictor is not None and degraded is None
    assert fallback == "the models failed on cuda (RuntimeError, see the log)"
    assert "CUDA failure 2: out of memory" in caplog.text


def test_models_that_fail_on_the_processor_too_leave_the_pages(
    live: tuple[ArtefactStore, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Predictor:
        raise RuntimeError("broken")

    monkeypatch.setattr(Predictor, "open", failing)

    assert opened(live, Accelerator("cuda")) == (None, "RuntimeError", None)


def test_check_says_what_is_missing(night: NightConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECK_BY_SUBJECT["live"](night)[0] == "not used"
    monkeypatch.setenv("LARDER_LIVE_PROVIDER", "tensorrt")
    state, detail = CHECK_BY_SUBJECT["live"](night)
    assert state == "to do" and "no TensorrtExecutionProvider: install onnxruntime-gpu" in detail
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["TensorrtExecutionProvider"])
    assert CHECK_BY_SUBJECT["live"](night)[0] == "ok"
