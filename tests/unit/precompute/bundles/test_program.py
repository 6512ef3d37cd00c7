"""A bundle's torch.export program: the numbers of its ONNX file, and nothing that a file could smuggle in."""

import io
import pickle
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import orjson
import pytest

from cache.errors import BundleError, ConfigError
from cache.model.tower import Histories, Tile, Tower
from precompute.bundles.bundle import Bundle
from precompute.reference.matrix_factorisation import SpectralShape
from precompute.reference.train import ReferenceData, train
from precompute.scoring import towers as device_tower
from precompute.scoring.towers import DeviceTower
from tests.devices import DEVICE

torch = pytest.importorskip("torch", reason="programs need torch: make torch-env")

from precompute.device.program import STREAM_COUNT, Program  # noqa: E402

ITEMS = 40
NAMES = ("user_tower", "item_tower", "user_affinity")


def data():
    rng = np.random.default_rng(0)
    return ReferenceData(
        rng.integers(0, 90, 900), rng.integers(0, ITEMS, 900), [f"i{number}" for number in range(ITEMS)]
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return train(
        data(), tmp_path_factory.mktemp("programs") / "bundle", dims=12, shape=SpectralShape(), writes_programs=True
    )


def model_of(bundle, name):
    return next(model for model in bundle.models if model.name == name)


def inputs_of(model, rows=30):
    rng = np.random.default_rng(1)
    if model.spec.history is None:
        return {"item_index": rng.integers(0, ITEMS, rows)}
    lengths = [0, 1, 16, 17, 300, *rng.integers(1, 40, rows)][:rows]
    return {"history": Histories.of([rng.integers(0, ITEMS, size) for size in lengths])}


def tower_of(model, program=None):
    names = [input_spec.name for input_spec in model.spec.inputs]
    running = program or Program.open(model.program_path, names, DEVICE)
    return DeviceTower(model.name, Tower.open(model.path, model.spec), running)


def alone(program, values):
    """Outputs of a program of one input for one batch."""
    (batch_output,) = program.outputs([[values]])
    return batch_output


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 30])
def test_a_program_gives_the_numbers_of_its_onnx_file(bundle, name, rows):
    model = model_of(bundle, name)
    inputs = inputs_of(model, rows)

    outputs = tower_of(model).run(inputs)

    expected_outputs = Tower.open(model.path, model.spec).run(inputs)
    assert outputs.dtype == np.float32 and outputs.shape == expected_outputs.shape
    assert np.abs(outputs - expected_outputs).max() <= 1e-5 * np.abs(expected_outputs).max()


def test_the_same_data_and_seed_give_the_same_bundle(bundle, tmp_path):
    retrained_bundle = train(data(), tmp_path / "again", dims=12, shape=SpectralShape(), writes_programs=True)

    assert retrained_bundle.digest == bundle.digest
    assert train(data(), tmp_path / "without", dims=12, shape=SpectralShape()).user_tower.program_path is None


def test_a_program_from_other_weights_is_refused_with_both_numbers(bundle, tmp_path):
    other_bundle = train(
        replace(data(), item_rows=data().item_rows[::-1].copy()), tmp_path / "other", dims=12, shape=SpectralShape(),
        writes_programs=True,
    )  # fmt: skip
    model = replace(bundle.user_tower, program_path=other_bundle.user_tower.program_path)

    with pytest.raises(BundleError, match="user_tower on the device differs") as caught:
        tower_of(model).run(inputs_of(model))

    assert caught.value.details["threshold"] == 1e-4
    assert float(str(caught.value.details["value"])) > 1e-4


def test_numbers_that_are_none_do_not_agree(bundle):
    class Broken:
        def outputs(self, feeds):
            for feed in feeds:
                yield np.full((len(feed[0]), 12), np.nan, np.float32)

    with pytest.raises(BundleError, match="nan"):
        tower_of(bundle.user_tower, Broken()).run(inputs_of(bundle.user_tower))


class Small:
    """A device that has room for so many rows at once, and counts what it was asked for."""

    def __init__(self, model, room):
        self.tower, self.room, self.batch_sizes = Tower.open(model.path, model.spec), room, []

    def outputs(self, feeds):
        for (history,) in feeds:
            self.batch_sizes.append(len(history))
            if len(history) > self.room:
                raise MemoryError("no room")
            yield self.tower.run_batch({"history": history})


def test_a_device_without_room_takes_smaller_batches_from_then_on(bundle, monkeypatch):
    monkeypatch.setattr(device_tower, "DEVICE_TILE", Tile(32, 1 << 27))
    model, inputs = bundle.user_tower, inputs_of(bundle.user_tower, 60)
    small = Small(model, 9)
    tower = tower_of(model, small)

    outputs = tower.run(inputs)
    first_batch_sizes, small.batch_sizes = small.batch_sizes, []
    repeated_outputs = tower.run(inputs)

    expected_outputs = Tower.open(model.path, model.spec).run(inputs)
    assert np.allclose(outputs, expected_outputs, rtol=0, atol=1e-6) and np.array_equal(outputs, repeated_outputs)
    assert max(first_batch_sizes) > 9 >= max(small.batch_sizes)


def test_a_device_without_any_room_leaves_the_rows_to_onnx(bundle, caplog):
    model = bundle.user_tower
    inputs = inputs_of(model)

    outputs = tower_of(model, Small(model, 0)).run(inputs)

    assert np.array_equal(outputs, Tower.open(model.path, model.spec).run(inputs))
    assert "using ONNX Runtime instead" in caplog.text


def test_a_chunk_of_short_histories_is_one_batch_of_a_device(bundle):
    """Crumbs for a processor's caches, hundreds of launches a chunk, took longer than the lists."""
    model = bundle.user_tower
    device = Small(model, 1 << 20)
    histories = Histories.of(list(np.random.default_rng(2).integers(0, ITEMS, (16_384, 3))))

    tower = tower_of(model, device)
    tower.run({"history": histories})

    assert device.batch_sizes[1:] == [16_384]  # after the rows that are compared


def test_the_next_batch_is_sent_before_one_is_waited_for():
    call_log = []

    def fail_if_called(*_):
        raise AssertionError("is not called")

    class Slow(Program):
        def _start_batch(self, feed, stream):
            call_log.append(f"sent {feed[0][0]}")

            def settled():
                call_log.append(f"there {feed[0][0]}")
                return feed[0]

            return settled

    feeds = [[np.array([number])] for number in range(3)]
    outputs = list(Slow(fail_if_called, [0], torch.device("cpu")).outputs(feeds))

    assert np.concatenate(outputs).tolist() == [0, 1, 2]
    assert call_log == ["sent 0", "sent 1", "there 0", "sent 2", "there 1", "there 2"]


def test_out_of_memory_is_a_memory_error_and_gives_the_stream_back(bundle):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    program = Program(full, [0], torch.device(DEVICE))
    for _ in range(STREAM_COUNT + 1):
        with pytest.raises(MemoryError, match="no room"):
            list(program.outputs([[np.zeros((1, 1), np.int32)]]))


def test_a_compiler_that_stumbles_over_a_new_shape_leaves_the_program_as_it_was(caplog):
    program = Program(lambda rows: rows.float(), [0], torch.device("cpu"))

    def compiled(*_):
        raise ValueError("a shape of its own")

    program._run = compiled

    (batch_output,) = program.outputs([[np.ones((2, 3), np.int32)]])

    assert batch_output.tolist() == [[1, 1, 1]] * 2 and "runs uncompiled from now on" in caplog.text


def test_a_program_that_was_changed_does_not_open(bundle, tmp_path):
    changed_folder = tmp_path / "bundle"
    changed_folder.mkdir()
    for source_file in bundle.path.iterdir():
        (changed_folder / source_file.name).write_bytes(source_file.read_bytes())
    with (changed_folder / "item_tower.pt2").open("ab") as file:
        file.write(b"x")

    with pytest.raises(BundleError, match=r"item_tower\.pt2 has SHA-256"):
        Bundle.open(changed_folder)


def test_without_torch_programs_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.delattr("precompute.reference.exports")
    monkeypatch.setitem(sys.modules, "precompute.reference.exports", None)

    with pytest.raises(ConfigError, match="extra `gpu`"):
        train(data(), tmp_path / "bundle", dims=12, shape=SpectralShape(), writes_programs=True)
    assert not (tmp_path / "bundle/bundle.json").exists()


def write_changed_archive(bundle, tmp_path, name, change, compression=zipfile.ZIP_STORED):
    """The item tower's archive with one member changed, or added."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(bundle.item_tower.program_path) as archive,
        zipfile.ZipFile(buffer, "w", compression) as written,
    ):
        root = archive.namelist()[0].partition("/")[0]
        names = {member_path.partition("/")[2]: archive.read(member_path) for member_path in archive.namelist()}
        for member_name, content in {name: b"", **names}.items():
            written.writestr(f"{root}/{member_name}", change(content) if member_name == name else content)
    path = tmp_path / "changed.pt2"
    path.write_bytes(buffer.getvalue())
    return path


class Ran:
    """Unpickling this would end the test."""

    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def pickled():
    return pickle.dumps(Ran())


def graph(change):
    def changed_graph(raw):
        program_json = orjson.loads(raw)
        change(program_json)
        return orjson.dumps(program_json)

    return changed_graph


def call(target):
    def change(program_json):
        program_json["graph_module"]["graph"]["nodes"][-1]["target"] = target

    return graph(change)


def expression(text):
    def change(program_json):
        for tensor_value in program_json["graph_module"]["graph"]["tensor_values"].values():
            for size in tensor_value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = text

    return graph(change)


def container(program_json):
    signature = program_json["graph_module"]["module_call_graph"][0]["signature"]
    signature["in_spec"] = signature["in_spec"].replace("builtins.dict", "collections.defaultdict")


def operator(program_json):
    program_json["graph_module"]["graph"]["nodes"][-1]["inputs"][0]["arg"] = {"as_operator": "torch.load"}


def pickled_weight(raw):
    weights_config = orjson.loads(raw)
    for weight_config in weights_config["config"].values():
        weight_config["use_pickle"] = True
    return orjson.dumps(weights_config)


EVIL = {
    "a call to the system": ("models/model.json", call("torch.os.system"), "torch.os.system"),
    "a file read": ("models/model.json", call("torch.ops.aten.from_file.default"), "from_file"),
    "a loader": ("models/model.json", call("torch.load"), "torch.load"),
    "a call by extension": ("models/model.json", call("#x:y"), "#x:y"),
    "an evaluated name": ("models/model.json", expression("__import__('os')"), "__import__"),
    "an evaluated call": ("models/model.json", expression("exit()"), "exit"),
    "an evaluated string": ("models/model.json", expression("Symbol('s1').free"), "free"),
    "an imported container": ("models/model.json", graph(container), "defaultdict"),
    "an operator as argument": ("models/model.json", graph(operator), "as_operator"),
    "pickled weights": ("data/weights/model_weights_config.json", pickled_weight, "pickled"),
    "weights of old": ("data/weights/model.pt", lambda _: pickled(), "model.pt"),
    "a compiled library": ("data/aotinductor/model/model.so", lambda _: b"x", "model.so"),
    "an object": ("data/constants/custom_obj_0", lambda _: pickled(), "custom_obj_0"),
    "no graph": ("models/model.json", lambda _: b"{", "not an exported program"),
    "another graph": ("models/model.json", lambda _: b"{}", "not a program"),
}


@pytest.mark.parametrize("attack_name", EVIL)
def test_what_a_tower_does_not_need_is_refused(bundle, tmp_path, attack_name):
    name, change, message_pattern = EVIL[attack_name]

    with pytest.raises(BundleError, match=message_pattern):
        Program.open(write_changed_archive(bundle, tmp_path, name, change), ["item_index"], DEVICE)


def test_sample_inputs_are_never_unpickled_and_guards_never_run(bundle, tmp_path):
    path = write_changed_archive(bundle, tmp_path, "data/sample_inputs/model.pt", lambda _: pickled())
    Program.open(path, ["item_index"], DEVICE)

    def guard(program_json):
        program_json["guards_code"] = ["__import__('pytest').fail('a guard ran')"]
        for node in program_json["graph_module"]["graph"]["nodes"]:
            node["metadata"] = {"stack_trace": "x", "source_fn_stack": "a,torch.os.system"}

    path = write_changed_archive(bundle, tmp_path, "models/model.json", graph(guard))
    program = Program.open(path, ["item_index"], DEVICE)

    expected_outputs = Tower.open(bundle.item_tower.path, bundle.item_tower.spec).run({"item_index": np.arange(3)})
    assert np.array_equal(alone(program, np.arange(3, dtype=np.int32)), expected_outputs)


def test_a_compressed_archive_and_what_is_none_are_refused(bundle, tmp_path):
    compressed_archive = write_changed_archive(bundle, tmp_path, "byteorder", lambda raw: raw, zipfile.ZIP_DEFLATED)
    with pytest.raises(BundleError, match="an exported tower does not need"):
        Program.open(compressed_archive, ["item_index"], DEVICE)
    invalid_file = tmp_path / "nothing.pt2"
    invalid_file.write_bytes(b"nothing")
    with pytest.raises(BundleError, match="not an exported program"):
        Program.open(invalid_file, ["item_index"], DEVICE)


def test_programs_may_be_opened_at_the_same_time(bundle):
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: Program.open(bundle.user_tower.program_path, ["history"], DEVICE), range(8)))

    history = np.zeros((2, 3), np.int32)
    assert len({alone(program, history).tobytes() for program in opened}) == 1


def test_other_inputs_than_specified_are_named(bundle):
    with pytest.raises(BundleError, match=r"\['item_index'\], but the specification has \['history'\]"):
        Program.open(bundle.item_tower.program_path, ["history"], DEVICE)


def test_a_compiler_that_fails_leaves_the_program_as_it_is(bundle, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    program = Program.open(bundle.item_tower.program_path, ["item_index"], DEVICE)
    uncompiled_outputs = alone(program, np.arange(3, dtype=np.int32))
    program._is_warm = False  # as on a GPU

    assert np.array_equal(alone(program, np.arange(3, dtype=np.int32)), uncompiled_outputs)
    assert "no compiler here" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_a_compiled_program_takes_any_number_of_rows(bundle):
    model = bundle.user_tower
    program = Program.open(model.program_path, ["history"], DEVICE)
    program._is_warm = False  # as on a GPU
    uncompiled_run = program._run

    for rows in (30, 1, 7):
        inputs = inputs_of(model, rows)
        expected_outputs = Tower.open(model.path, model.spec).run(inputs)
        outputs = tower_of(model, program).run(inputs)
        assert np.abs(outputs - expected_outputs).max() <= 1e-5 * np.abs(expected_outputs).max()
    assert program._run is not uncompiled_run


def test_the_comparison_is_made_once(bundle, monkeypatch):
    tower = tower_of(bundle.item_tower)
    inputs = inputs_of(bundle.item_tower)
    tower.run(inputs)
    monkeypatch.setattr(device_tower, "DEVICE_AGREEMENT", -1.0)

    tower.run(inputs)
