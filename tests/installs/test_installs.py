"""Each lock and each extra in an environment of its own, where its program runs once against a real night."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import orjson
import pyarrow.parquet as pq
import pytest

from precompute.config.settings import NightConfig
from tests.installs.conftest import Install
from tests.integration.nights import build_night
from tests.integration.program import ROOT, environment, started

pytestmark = pytest.mark.installs

SHOP = """
namespace = "installed"
shards = 2
[sources]
interactions = ["interactions.parquet"]
item_features = "items.parquet"
[reference]
dims = 16
"""


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url)


def clean(environ: dict[str, str], python: Path) -> dict[str, str]:
    """Without this repository on any path, and without this environment's programs."""
    environ.pop("PYTHONPATH", None)
    return environ | {"PATH": f"{python.parent}:/usr/bin:/bin"}


@pytest.fixture
def served(night: NightConfig, tmp_path: Path) -> Callable[..., Iterator[str]]:
    """The URL of a service that an environment's Python runs."""

    def run(python: Path, **more: str) -> Iterator[str]:
        assert night.redis_url is not None
        environ = environment(night, tmp_path / "state", REDIS_URL=night.redis_url, **more)
        with started(clean(environ, python), python=python, cwd=tmp_path) as (_, url):
            yield url

    return run


def scored_user(night: NightConfig) -> str:
    """A user that the night scored."""
    return str(pq.read_table(night.path("interactions.parquet"))["user"][0])


def run_program(python: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """What a program of the environment prints, run elsewhere than in the repository."""
    base_environ = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    return subprocess.run(
        [python, *arguments], env=clean(base_environ, python), cwd=folder,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(("lock", "is_pure"), [("", False), ("serving.txt", False), ("", True)])
def test_the_extra_of_the_service_serves(
    install: Install,
    served: Callable[..., Iterator[str]],
    night: NightConfig,
    tmp_path: Path,
    lock: str,
    *,
    is_pure: bool,
) -> None:
    python = install("" if lock else "serving", lock=lock, is_pure=is_pure)
    kernels = "from cache.native.loader import kernels; print(kernels.__name__)"

    used = "cache.native.pure\n" if is_pure else "cache.native._columns\n"
    assert run_program(python, tmp_path, "-c", kernels).stdout == used

    for url in served(python):
        answers = [httpx.get(f"{url}/v1/lookup/user_topk/{scored_user(night)}").json() for _ in range(2)]
        assert [answer["source"] for answer in answers] == ["l2", "l1"]


def test_the_command_of_a_base_install(install: Install, tmp_path: Path) -> None:
    larder = install().with_name("larder")

    for arguments, code, line in [
        (("--version",), 0, "larder "),
        (("tokens", "--help"), 0, "usage: larder tokens "),
        (("lookup", "--help"), 0, "usage: larder lookup "),
        (("explain", "--help"), 0, "usage: larder explain "),
        (("check",), 3, "to do     settings  no larder.toml here"),
        (("serve",), 2, "larder: larder serve needs fastapi, httptools, prometheus_client, uvicorn"),
        (("night",), 2, "larder: larder night needs onnx, pyarrow, rich, scipy, not installed here"),
        (("dags", "install", str(tmp_path / "dags")), 0, str(tmp_path / "dags/larder/canary.py")),
    ]:
        completed = run_program(larder, tmp_path, *arguments)
        assert completed.returncode == code, completed.stderr
        assert (completed.stdout + completed.stderr).startswith(line), arguments


@pytest.mark.parametrize("extra", ["", "precompute", "client", "top"])
def test_only_the_service_brings_a_web_framework(install: Install, tmp_path: Path, extra: str) -> None:
    python = install(extra)
    list_them = "from importlib.metadata import distributions; print(*(d.name for d in distributions()))"

    completed = run_program(python, tmp_path, "-c", list_them)

    installed = set(completed.stdout.split())
    assert not {"fastapi", "starlette", "uvicorn"} & installed
    assert "larder-predictions" in installed


def test_what_a_base_install_lacks_is_named_with_its_remedy(install: Install, tmp_path: Path) -> None:
    python = install()

    for arguments, remedy in [
        (("-m", "serving"), "pip install 'larder-predictions[serving]'"),
        (("-m", "precompute", "status"), "pip install 'larder-predictions[precompute]'"),
        (("-m", "serving", "top", "--once"), "pip install 'larder-predictions[top]'"),
        (("-c", "import serving.client"), "pip install 'larder-predictions[client]'"),
    ]:
        completed = run_program(python, tmp_path, *arguments)
        assert completed.returncode, arguments
        assert completed.stderr.rstrip().splitlines()[-1].endswith(remedy), completed.stderr
        assert completed.stderr.count("\n") == 1 or arguments[0] == "-c", completed.stderr


@pytest.mark.parametrize("is_pure", [False, True])
def test_the_extra_of_the_night_runs_a_night(
    install: Install, night: NightConfig, tmp_path: Path, *, is_pure: bool
) -> None:
    python = install("precompute,local", is_pure=is_pure)
    for name in ("interactions.parquet", "items.parquet"):
        shutil.copy(night.path(name), tmp_path)
    (tmp_path / "larder.toml").write_text(SHOP)

    for arguments in (("train",), ("night",), ("status", "--json")):
        completed = run_program(python, tmp_path, "-m", "precompute", "--config", "larder.toml", *arguments)
        assert completed.returncode in ((0, 3) if arguments[0] == "status" else (0,)), completed.stderr


def test_the_client_and_the_terminal_ask_a_service(
    install: Install, served: Callable[..., Iterator[str]], night: NightConfig, tmp_path: Path
) -> None:
    python = install("client,top,otel,serving")
    lookup_program = (
        "from serving.client import Client; import sys;"
        "print(Client(sys.argv[1]).lookup('user_topk', sys.argv[2]).source)"
    )

    for url in served(python, LARDER_TRACES="true"):
        assert run_program(python, tmp_path, "-c", lookup_program, url, scored_user(night)).stdout == "l2\n"
        assert run_program(python, tmp_path, "-m", "serving", "top", "--once", "--url", url).returncode == 0


@pytest.mark.parametrize("lock", ["", "airflow.txt"])
def test_airflow_parses_the_dags_and_has_its_executors(install: Install, tmp_path: Path, lock: str) -> None:
    python = install("" if lock else "airflow", lock=lock)
    folder = tmp_path / "environment/lib/python3.11/site-packages/dags"
    describe = ROOT / "tests/dags/describe.py"
    executors = (
        "from airflow.providers.celery.executors.celery_executor import CeleryExecutor;"
        "from airflow.providers.cncf.kubernetes.executors.kubernetes_executor import KubernetesExecutor"
    )

    parsed = run_program(python, tmp_path, str(describe), str(folder))
    imported = run_program(python, tmp_path, "-c", executors)

    assert orjson.loads(parsed.stdout.splitlines()[-1])["errors"] == {}, parsed.stderr
    assert imported.returncode == 0, imported.stderr
