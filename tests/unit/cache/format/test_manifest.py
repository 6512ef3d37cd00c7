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
from cache.format.manifest import Index, Manifest, Model, NamedFilter
from cache.format.manifest_files import Artefact
from cache.model.input_sample import FACT
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from serving.quality.night_inputs import open_inputs
from tests.unit.serving.world import World

FILE = Artefact("some/file.bin", 1, "")
ESCAPES = (
    "../other", "a/../../b", "/etc/passwd", "a//b", "", "a/", "./a", "a/.", "..\\other", "a\\b",
    "a\0b", None, 7, ["a"],
)  # fmt: skip


def whole() -> Manifest:
    """One with every kind of file."""
    manifest = World().snapshot().manifest
    model = Model("tower", FILE, FILE, "d", {})
    index = Index("cosine", "flat", FILE)
    facts = {FACT: asdict(FILE)}
    return replace(manifest, models={"tower": model}, indexes={"items": index}, facts=facts)


def files(told: Any) -> Iterator[dict[str, Any]]:
    """Every description of a file in a manifest's JSON."""
    if isinstance(told, dict):
        if "sha256" in told:
            yield told
        told = list(told.values())
    for each in told if isinstance(told, list) else ():
        yield from files(each)


@pytest.mark.parametrize("path", ESCAPES, ids=repr)
def test_no_file_of_a_manifest_lies_outside_of_its_generation(path: object, tmp_path: Path) -> None:
    sound = whole().to_bytes()
    described = list(files(orjson.loads(sound)))
    is_text = isinstance(path, str)
    said = "no path below a generation" if is_text else r"path\n  Input should be a valid string"
    assert Manifest.from_bytes(sound).to_bytes() == sound and len(described) > 10

    for at in range(len(described)):
        told = orjson.loads(sound)
        spoilt = list(files(told))[at]
        is_fact = spoilt is told["facts"].get(FACT)
        spoilt["path"] = path
        if not is_fact:
            with pytest.raises(CorruptArtefact, match=said):
                Manifest.from_bytes(orjson.dumps(told))

    store = ArtefactStore("memory://elsewhere", tmp_path)
    facts = {FACT: {**asdict(FILE), "path": path}}
    snapshot = World().snapshot(manifest=replace(whole(), facts=facts))
    assert open_inputs(store, snapshot) is None and not list(tmp_path.iterdir())


def test_a_manifest_has_all_its_fields_each_of_its_type_and_no_others() -> None:
    sound = orjson.loads(whole().to_bytes())
    table = next(iter(sound["tables"]))

    def spoilt(change: Callable[[Any], object]) -> bytes:
        told = copy.deepcopy(sound)
        change(told)
        return orjson.dumps(told)

    for change in (
        lambda told: told.pop("gates"),
        lambda told: told["tables"][table].pop("labels"),
        lambda told: told["tables"][table]["parts"][0].update(count="5"),
        lambda told: told.update(data_until=1.0),
        lambda told: told["tables"][table].update(kind="topk"),
        lambda told: told.update(unknown=1),
    ):
        with pytest.raises(CorruptArtefact, match="not a manifest"):
            Manifest.from_bytes(spoilt(change))


def test_a_manifest_tells_filters_only_where_there_are_any() -> None:
    declared = replace(whole(), filters={"cheap": NamedFilter({"<": ["price", 20]})})

    assert "filters" not in orjson.loads(whole().to_bytes())
    assert Manifest.from_bytes(declared.to_bytes()) == declared


def test_who_only_names_a_manifest_does_not_wait_for_its_reader() -> None:
    program = "import sys, cache.format.manifest; print('pydantic' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert found.stdout == "False\n"


def test_a_manifest_under_the_name_of_another_generation_is_refused(tmp_path: Path) -> None:
    store, manifest = ArtefactStore(str(tmp_path)), whole()
    other = "20260101T000000Z-bbbbbbbbbbbb"
    for name in (manifest.generation, other):
        store.write(generation_path(name, "manifest.json"), manifest.to_bytes())

    assert read_manifest(store, manifest.generation) == manifest
    with pytest.raises(CorruptArtefact, match="calls itself"):
        read_manifest(store, other)
