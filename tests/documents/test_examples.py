"""Examples of the documents, run as they stand against one small night and its service.

A page's blocks run in their order and share a folder: the shop's of `world`, or an empty one where a page makes its own
data.
"""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.documents import world
from tests.documents.blocks import ALL, INSTALLING, LIBRARIES, Block, of_library
from tests.documents.shell import Shell
from tests.documents.test_blocks import RUN, location_of
from tests.integration.program import started

FROM_NOTHING = {
    "docs/tutorial/from-your-data.md",
    *(f"docs/how-to/import/{page_name}.md" for page_name in ("vectors", "torch", "classifiers")),
}
"""Pages for whoever has nothing yet: an empty folder, no Redis, no settings."""

OF_LIBRARIES = [block for name in LIBRARIES for block in of_library(name)]
EXAMPLES = [
    block
    for block in ALL
    if block.kind in RUN and not block.reason and block.page not in INSTALLING and block not in OF_LIBRARIES
]
ANSWERS = [block for block in ALL if block.kind == "json" and '"source"' in block.text]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Shell]:
    """The shell in the shop's folder, with a service that answers."""
    folder = tmp_path_factory.mktemp("shop")
    generation = world.build(folder, redis_url)
    environ = world.environment(redis_url, folder)
    (folder / "etc").mkdir()
    names = {
        ".venv/bin/python": "python",
        ".venv/bin/larder": "larder",
        "/etc/larder": str(folder / "etc"),
        "GENERATION": generation,
        "u-00042": "42",  # as the demo calls them
        " plan --qps": " plan --seconds 1 --qps",
        " plan --users": " plan --seconds 1 --users",
        "deadline_ms=100": "deadline_ms=5000",  # tests share few cores
    }
    with started(environ, folder / "service.log", cwd=folder) as (_, url):
        shell = Shell(folder, environ, url, names)
        yield shell
        shell.close()


@pytest.fixture(scope="module")
def fresh_installs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Shell]]:
    """Shells of readers who have only installed Larder, one for each page."""
    shells: dict[str, Shell] = {}

    def of(page: str) -> Shell:
        if page not in shells:
            folder = tmp_path_factory.mktemp("nothing")
            environ = world.environment("", folder)
            environ_without_shop = {name: value for name, value in environ.items() if name not in world.SHOP_VARIABLES}
            shells[page] = Shell(folder, environ_without_shop)
        return shells[page]

    yield of
    for shell in shells.values():
        shell.close()


@pytest.mark.parametrize("block", EXAMPLES, ids=location_of)
def test_an_example_runs(block: Block, request: pytest.FixtureRequest) -> None:
    if block.page.endswith("import/torch.md"):
        pytest.importorskip("torch")
    shell: Shell = (
        request.getfixturevalue("fresh_installs")(block.page)
        if block.page in FROM_NOTHING
        else request.getfixturevalue("shop")
    )

    completed = shell.sh(block.text) if block.kind == "sh" else shell.python(block.text)

    assert completed.returncode == 0, f"{block.location}\n{completed.stdout}"


@pytest.mark.parametrize("block", ANSWERS, ids=location_of)
def test_an_answer_has_the_fields_and_types_of_a_real_one(block: Block, shop: Shell) -> None:
    documented_answer = json.loads(block.text.replace("u-00042", "42"))
    real = httpx.get(f"{shop.url}/v1/lookup/{documented_answer['table']}/{documented_answer['id']}").json()

    assert {name: type(value) for name, value in documented_answer.items()} == {
        name: type(value) for name, value in real.items()
    }
