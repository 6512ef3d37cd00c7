"""Two other parsers of HTTP, which judge where each request ends."""

from collections.abc import Iterator

import pytest

from tests.door.judges import H11Judge, Judge, node_judge


@pytest.fixture(scope="module")
def judges() -> Iterator[list[Judge]]:
    with node_judge() as node:
        print(f"judges: h11, {node.version}")
        yield [H11Judge(), node]
