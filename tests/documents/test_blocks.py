"""Every block of the documents is run, read, or says why not."""

import json
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from precompute.config.settings import night_config
from serving.config.settings import ServingConfig
from tests.documents.blocks import ALL, Block, blocks
from tests.unit.test_layering import ROOT

RUN = ("sh", "python")
"""Languages of blocks that `test_examples` runs."""
TRIED = ("nginx",)
"""Settings of proxies that `test_behind_a_proxy` starts."""
READ = ("toml", "json")
"""Languages of blocks that are read as what they are."""
DISPLAYED = ("text", "{toctree}")
"""Drawings and messages; and the contents of the site, which `make docs` builds."""

REASONS = {
    "it runs this repository's own tests": 15,
    "it takes minutes": 3,
    "needs the demo's model, which its own test asks": 2,
    "needs a generation that a gate has refused": 1,
    "needs PostgreSQL": 1,
}
"""Why a block is not run, and how many have that reason; of these, what they name is looked for."""

NOT_RUN = [block for block in ALL if block.reason]


def named(kind: str) -> list[Block]:
    """Return the blocks of a language."""
    return [block for block in ALL if block.kind == kind]


def location_of(block: Block) -> str:
    """Name a test by it."""
    return block.location


@pytest.mark.parametrize("block", ALL, ids=location_of)
def test_a_block_has_a_language_that_something_is_done_with(block: Block) -> None:
    assert block.kind in (*RUN, *TRIED, *READ, *DISPLAYED), block.location
    assert not block.reason or block.kind in RUN, "only what is run needs a reason not to be"


def test_what_is_not_run_is_counted_and_has_one_of_few_reasons() -> None:
    assert Counter(block.reason for block in NOT_RUN) == REASONS
    assert len(REASONS) < 6 and sum(REASONS.values()) < 24


@pytest.mark.parametrize("block", named("text"), ids=location_of)
def test_no_command_hides_in_a_drawing(block: Block) -> None:
    assert not re.search(r"^\s*\$?\s*(python|make|curl|pip|docker) ", block.text, re.MULTILINE)


@pytest.mark.parametrize("block", NOT_RUN, ids=location_of)
def test_what_is_not_run_names_targets_files_and_modules_that_exist(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.sub(r"#.*", "", block.text)

    for make_arguments in re.findall(r"^make (.+)$", commands, re.MULTILINE):
        assert {argument for argument in make_arguments.split() if "=" not in argument} <= targets
    for module in re.findall(r"python -m ([\w.]+)", commands):
        assert find_spec(module), module
    for path in re.findall(r"\btests/[\w/.{},*-]+", commands):
        assert list(ROOT.glob(path)), path


@pytest.mark.parametrize("block", named("toml"), ids=location_of)
def test_toml_is_a_configuration_of_night_and_service(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "larder.toml"
    path.write_text(block.text)

    # Both loaders refuse unknown names.
    night_config(str(path), {})
    ServingConfig.load({"LARDER_CONFIG": str(path)})


@pytest.mark.parametrize("block", named("json"), ids=location_of)
def test_json_can_be_read(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


def test_a_reason_belongs_to_the_block_right_after_it() -> None:
    page = (
        "<!-- not run: no such machine -->\n```sh\na\n```\n\n```sh\nb\n```\n\n"
        "1. x\n\n   <!-- not run: y -->\n   ```sh\n   c\n   ```\n"
    )

    assert [block.reason for block in blocks("page.md", page)] == ["no such machine", "", "y"]
    assert [block.line for block in blocks("page.md", page)] == [2, 6, 13]
