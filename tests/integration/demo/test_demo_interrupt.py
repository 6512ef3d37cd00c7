"""Ctrl-C at any moment of the demo leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from infra.local.service import ROOT
from tests.marked import marked
from tests.polling import poll_until

pytestmark = [pytest.mark.storm, pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")]

START_S = 300.0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("after", ["Data", "Redis and Airflow", "train_reference", "Lookup service"])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, how: signal.Signals, after: str) -> None:
    # given: a demo that has just finished one of its steps
    process_tag = f"demo-under-test-{uuid.uuid4().hex}"
    log = tmp_path / "demo.log"
    command = [sys.executable, "-u", "-m", "infra.demo", "--quick", "--state", str(tmp_path / "s")]
    environ = {**os.environ, "UNDER_TEST": process_tag}
    with log.open("w") as log_file:
        demo = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=log_file, stderr=log_file)
    try:
        assert poll_until(
            lambda: demo.poll() is not None or f"  {after}" in log.read_text() or f"DAG {after}" in log.read_text(),
            START_S,
        )
        assert demo.poll() is None, log.read_text()
        time.sleep(0.5)  # into the middle of the next step

        # when
        demo.send_signal(how)
        code = demo.wait(timeout=60.0)

        # then
        assert code == (-signal.SIGKILL if how == signal.SIGKILL else 130), log.read_text()
        assert poll_until(lambda: not marked(process_tag), 30.0), marked(process_tag)
    finally:
        demo.kill()
        demo.wait()
