"""A feature of the service can be deleted with its lines in the list, and what is left starts and answers."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.unit.test_layering import FEATURE_LIST, MODULES, ROOT, feature_of, imported_modules

ATTACHED = sorted({feature_of(name) for name in imported_modules(FEATURE_LIST)} - {""})
QUICK = ("events", "explain", "filters", "near", "tracing")

ANSWERS = """
import asyncio, sys
import httpx
from serving.app import create_app
from serving.config.settings import ServingConfig

async def main():
    app = create_app(ServingConfig(artifacts=sys.argv[1], redis_url="redis://127.0.0.1:1"))
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://larder")
    async with app.router.lifespan_context(app), client as http:
        for path in ("/healthz", "/v1/lookup/user_topk/u1", "/metrics", "/openapi.json"):
            print(path, (await http.get(path)).status_code)

asyncio.run(main())
"""


def with_dependents(feature: str) -> set[str]:
    """The feature, and those that import it."""
    deleted = {feature}
    while True:
        dependents = {
            importer
            for module in MODULES
            if module.startswith("serving.") and (importer := feature_of(module))
            if deleted & {feature_of(name) for name in imported_modules(module) if name.startswith("serving.")}
        }  # fmt: skip
        if dependents <= deleted:
            return deleted
        deleted |= dependents


def tree_without(features: Iterable[str], folder: Path) -> Path:
    """A copy of the packages that the service needs, without these features."""
    for package in ("cache", "serving"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    listed = folder / "serving/features.py"
    text = listed.read_text()
    for feature in features:
        shutil.rmtree(folder / "serving" / feature)
        text = re.sub(rf"^import serving\.{feature}\.attach as {feature}\n", "", text, flags=re.MULTILINE)
        text = re.sub(rf"^    Feature\({feature}\..*\),\n", "", text, flags=re.MULTILINE)
    listed.write_text(text)
    return folder


def run(folder: Path, *arguments: str) -> str:
    """What a program prints that runs in a tree; it must succeed."""
    completed_process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert completed_process.returncode == 0, completed_process.stdout + completed_process.stderr
    return completed_process.stdout


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.storm)
        for name in ATTACHED
    ],
)  # fmt: skip
def test_without_a_feature_the_service_starts_and_answers(feature: str, tmp_path: Path) -> None:
    # Given a source tree without the feature and the features that depend on it
    folder = tree_without(with_dependents(feature), tmp_path / "tree")

    # When it is linted and started, without a generation and without Redis
    run(folder, "-m", "ruff", "check", "-q", "serving")
    lines = run(folder, "-c", ANSWERS, str(tmp_path / "artifacts")).splitlines()

    # Then the service answers, with 503 where it has nothing loaded
    assert lines == [
        "/healthz 200", "/v1/lookup/user_topk/u1 503", "/metrics 200", "/openapi.json 200",
    ]  # fmt: skip


@pytest.mark.storm
@pytest.mark.parametrize("feature", ATTACHED)
def test_without_a_feature_the_types_are_right(feature: str, tmp_path: Path) -> None:
    folder = tree_without(with_dependents(feature), tmp_path / "tree")

    run(folder, "-m", "mypy", "--strict", "--no-error-summary", "cache", "serving")
