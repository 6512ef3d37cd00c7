"""`python -m serving top` as a program of its own, beside a running service."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from precompute.config.settings import NightConfig
from tests.integration.fleet import fleet
from tests.integration.nights import build_night
from tests.integration.program import ROOT
from tests.polling import poll_until


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=50, items=40)


@pytest.fixture(scope="module")
def url(night: NightConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service that wants a token."""
    folder = tmp_path_factory.mktemp("service")
    with fleet(night, folder, count=1, LARDER_TOKEN="secret") as (service,):
        yield service.url


def top(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    environ = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "110"} | more
    return subprocess.run(
        [sys.executable, "-m", "serving", "top", *arguments],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_once_prints_what_the_dashboard_knows(url: str) -> None:
    httpx.get(f"{url}/v1/lookup/user_topk/nobody", headers={"Authorization": "Bearer secret"})
    completed_process = top("--url", url, "--once", "--token", "secret")

    assert completed_process.returncode == 0, completed_process.stderr
    assert (
        "Larder" in completed_process.stdout
        and "live" in completed_process.stdout
        and "breakers 1 closed" in completed_process.stdout
    )
    for source in ("l1", "l2", "live", "previous", "default"):
        assert f" {source} " in completed_process.stdout


@pytest.mark.parametrize(
    ("arguments", "expected_error"),
    [
        (("--token", "wrong"), "a token is required: pass --token or set LARDER_TOKEN"),
        (("--url", "http://127.0.0.1:9", "--token", "secret"), "cannot be reached"),
        (("--url", "ftp://somewhere"), "http://host:port"),
        (("--url", "http://127.0.0.1:nine"), "cannot be reached"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(url: str, arguments: tuple[str, ...], expected_error: str) -> None:
    completed_process = top("--once", "--url", url, *arguments)

    assert (
        completed_process.returncode == 2
        and expected_error in completed_process.stderr
        and completed_process.stdout == ""
    )
    assert completed_process.stderr.count("\n") == 1


def test_without_rich_the_extra_is_named(url: str, tmp_path: Path) -> None:
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'rich' else find(name, *a)\n"
    )
    completed_process = top("--once", "--url", url, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")

    assert completed_process.returncode == 2 and "pip install 'larder-predictions[top]'" in completed_process.stderr


def test_it_goes_on_until_ctrl_c_which_ends_it_cleanly(url: str) -> None:
    terminal, child_terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "serving", "top", "--url", url, "--every", "0.5"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "LARDER_TOKEN": "secret", "TERM": "xterm"},
        cwd=ROOT, stdout=child_terminal, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(child_terminal)
    os.set_blocking(terminal, False)
    drawn = bytearray()

    def frames() -> int:
        with contextlib.suppress(OSError):  # nothing new, or nobody writes any more
            drawn.extend(os.read(terminal, 1 << 16))
        return drawn.count(b"UTC")

    try:
        assert poll_until(lambda: frames() >= 2)
        process.send_signal(signal.SIGINT)
        assert poll_until(lambda: frames() >= 2 and process.poll() is not None)
    finally:
        process.kill()
        process.wait(10)
        os.close(terminal)
    assert process.returncode == 0 and b"Traceback" not in drawn
