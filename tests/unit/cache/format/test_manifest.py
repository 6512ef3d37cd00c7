"""A manifest is believed about its own generation, and about nothing beyond it."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.errors import CorruptArtefact
from cache.format.manifest import Artefact, Index, Manifest, Model, NamedFilter
from cache.quality.probe import PROBE_FACT
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from serving.quality.comparison import open_night_inputs
from tests.unit.serving.world import World

FILE = Artefact("some/file.bin", 1, "")
ESCAPES = (
    "../other", "a/../../b", "/etc/passwd", "a//b", "", "a/", "./a", "a/.", "..\\other", "a\\b",
    "a\0b", None, 7, ["a"],
)  # fmt: skip


def make_complete_manifest() -> Manifest:
    """One with every kind of file."""
    manifest = World().snapshot().manifest
    model = Model("tower", FILE, FILE, "d", {})
    index = Index("cosine", "flat", FILE)
    facts = {PROBE_FACT: asdict(FILE)}
    return replace(manifest, models={"tower": model}, indexes={"items": index}, facts=facts)


def files(json_node: Any) -> Iterator[dict[str, Any]]:
    """Every description of a file in a manifest's JSON."""
    if isinstance(json_node, dict):
        if "sha256" in json_node:
            yield json_node
        json_node = list(json_node.values())
    for child in json_node if isinstance(json_node, list) else ():
        yield from files(child)


@pytest.mark.parametrize("path", ESCAPES, ids=repr)
def test_no_file_of_a_manifest_lies_outside_of_its_generation(path: object, tmp_path: Path) -> None:
    sound = make_complete_manifest().to_bytes()
    described = list(files(orjson.loads(sound)))
    is_text = isinstance(path, str)
    message_pattern = "is not a path below a generation" if is_text else r"path\n  Input should be a valid string"
    assert Manifest.from_bytes(sound).to_bytes() == sound and len(described) > 10

    for at in range(len(described)):
        manifest_json = orjson.loads(sound)
        spoilt = list(files(manifest_json))[at]
        is_fact = spoilt is manifest_json["facts"].get(PROBE_FACT)
        spoilt["path"] = path
        if not is_fact:
            with pytest.raises(CorruptArtefact, match=message_pattern):
                Manifest.from_bytes(orjson.dumps(manifest_json))

    store = ArtefactStore("memory://elsewhere", tmp_path)
    facts = {PROBE_FACT: {**asdict(FILE), "path": path}}
    snapshot = World().snapshot(manifest=replace(make_complete_manifest(), facts=facts))
    assert open_night_inputs(store, snapshot) is None and not list(tmp_path.iterdir())


def test_a_manifest_has_all_its_fields_with_their_types_and_no_others() -> None:
    sound = orjson.loads(make_complete_manifest().to_bytes())
    table = next(iter(sound["tables"]))

    def spoilt(change: Callable[[Any], object]) -> bytes:
        manifest_json = copy.deepcopy(sound)
        change(manifest_json)
        return orjson.dumps(manifest_json)

    for change in (
        lambda manifest_json: manifest_json.pop("gates"),
        lambda manifest_json: manifest_json["tables"][table].pop("labels"),
        lambda manifest_json: manifest_json["tables"][table]["parts"][0].update(count="5"),
        lambda manifest_json: manifest_json.update(data_until=1.0),
        lambda manifest_json: manifest_json["tables"][table].update(kind="topk"),
        lambda manifest_json: manifest_json.update(unknown=1),
    ):
        with pytest.raises(CorruptArtefact, match="not a manifest"):
            Manifest.from_bytes(spoilt(change))


def test_a_manifest_tells_filters_only_where_there_are_any() -> None:
    declared = replace(make_complete_manifest(), filters={"cheap": NamedFilter({"<": ["price", 20]})})

    assert "filters" not in orjson.loads(make_complete_manifest().to_bytes())
    assert Manifest.from_bytes(declared.to_bytes()) == declared


def test_who_only_names_a_manifest_does_not_wait_for_its_reader() -> None:
    program = "import sys, cache.format.manifest; print('pydantic' in sys.modules)"
    completed_process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert completed_process.stdout == "False\n"


def test_a_manifest_under_the_name_of_another_generation_is_refused(tmp_path: Path) -> None:
    store, manifest = ArtefactStore(str(tmp_path)), make_complete_manifest()
    other_generation_id = "20260101T000000Z-bbbbbbbbbbbb"
    for name in (manifest.generation, other_generation_id):
        store.write(generation_path(name, "manifest.json"), manifest.to_bytes())

    assert read_manifest(store, manifest.generation) == manifest
    with pytest.raises(CorruptArtefact, match="names generation"):
        read_manifest(store, other_generation_id)


@pytest.mark.parametrize("field_name", ["rule", "passed"])
def test_a_manifest_with_a_gate_that_lacks_its_rule_or_verdict_is_damaged(field_name: str) -> None:
    gate = {"rule": "coverage", "passed": True}
    document = orjson.loads(replace(make_complete_manifest(), gates=(gate,)).to_bytes())
    assert Manifest.from_bytes(orjson.dumps(document)).gates == (gate,)
    del document["gates"][0][field_name]

    with pytest.raises(CorruptArtefact, match="a gate without"):
        Manifest.from_bytes(orjson.dumps(document))
