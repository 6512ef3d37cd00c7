"""The command line as people use it: repeats, single steps without a Redis, interrupts, errors without tracebacks."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cache.process.redis_server import running_server
from precompute import __main__ as program
from precompute.steps import embed_items
from tests.integration.nights import prepare
from tests.integration.shell import shell
from tests.polling import poll_until

ROOT = Path(__file__).parents[3]
SETTINGS = """
namespace = "shell"
shards = 2
artifacts = "artifacts"
state = "state"
bundle = "bundle"
threads = 1
warm_timeout_s = 1
[sources]
interactions = "interactions.parquet"
item_features = "items.parquet"
[reference]
dims = 16
[tables.user_topk]
kind = "user_topk"
k = 20
[tables.item_similar]
kind = "item_similar"
k = 20
metric = "cosine"
"""


@pytest.fixture
def folder(tmp_path):
    """Data, a bundle and settings; no Redis anywhere."""
    prepare(tmp_path, "redis://unused", users=120, items=60)
    (tmp_path / "larder.toml").write_text(SETTINGS)
    return tmp_path


def environment(folder):
    environ = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS")}
    return {**environ, "HOME": str(folder), "TERM": "xterm-256color"}


def command(folder, *arguments):
    config = str(folder / "larder.toml")
    return [sys.executable, "-m", "precompute", "--config", config, *arguments]


def run(folder, *arguments):
    return subprocess.run(
        command(folder, *arguments), capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env=environment(folder),
    )  # fmt: skip


def run_here(folder, *arguments):
    """Run the command within this process."""
    config = str(folder / "larder.toml")
    return shell("--config", config, *arguments, environ=environment(folder))


def generation_of(completed_process):
    assert completed_process.returncode == 0, completed_process
    return re.findall(r"\d{8}T\d{6}Z-[0-9a-f]{12}", completed_process.stdout)[0]


def processes_naming(folder):
    """Command lines of the processes that mention this folder."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            command_lines.append(line)
    return command_lines


def test_a_night_without_a_cut_is_named_after_its_inputs_and_finds_its_own_work(folder):
    for name in ("items.parquet", "bundle/bundle.json"):
        os.utime(folder / name, (1_600_000_000, 1_600_000_000))
    os.utime(folder / "interactions.parquet", (1_700_000_000, 1_700_000_000.9))
    first = generation_of(run_here(folder, "begin"))
    time.sleep(1.0 - time.time() % 1.0)  # the next second has begun: `now` would be another name
    assert generation_of(run_here(folder, "begin")) == first
    assert first.startswith("20231114T221320Z-")

    os.utime(folder / "items.parquet", (1_700_000_060, 1_700_000_060))
    later = generation_of(run_here(folder, "begin"))
    assert later.startswith("20231114T221420Z-") and later != first


def test_a_standing_cut_cuts_no_row(folder):
    for name in ("interactions.parquet", "items.parquet", "bundle/bundle.json"):
        os.utime(folder / name, (86_400, 86_400))
    generation = generation_of(run_here(folder, "begin"))
    begin_path = folder / f"artifacts/shell/generations/{generation}/work/begin.json"
    assert generation.startswith("19700102T000000Z")
    assert json.loads(begin_path.read_bytes())["interactions"] > 1000


def test_a_night_may_stop_before_its_publish(folder):
    completed_process = run(folder, "night", "--until", "verify")
    output = " ".join(completed_process.stdout.split())

    assert completed_process.returncode == 0, completed_process
    assert "is verified, but not published: `larder canary start" in output
    assert "publish" not in [line.split()[0] for line in completed_process.stdout.splitlines() if line.split()]


def test_single_steps_work_one_by_one_without_a_redis(folder):
    generation = generation_of(run(folder, "begin"))
    for step in ("score", "index", "quantize", "load", "verify", "publish", "warm"):
        completed_process = run(folder, step, generation)
        assert completed_process.returncode == 0, (step, completed_process)
    assert "live" in run(folder, "status").stdout
    assert "already" in run(folder, "night").stdout
    pinned = run(folder, "pin", generation, "--reason", "x")
    assert pinned.returncode == 0, pinned

    # Publish a second generation at once from its files, and roll it back.
    os.utime(folder / "interactions.parquet", (1_900_000_000, 1_900_000_000))
    second = generation_of(run_here(folder, "begin"))
    for step in ("score", "index", "quantize", "publish"):
        completed_process = run_here(folder, step, second)
        assert completed_process.returncode == 0, (step, completed_process)
    back = run_here(folder, "roll-back", "--to", generation, "--reason", "x")
    assert back.returncode == 0 and generation in back.stdout, back
    refused_publish = run_here(folder, "publish", second)
    assert refused_publish.returncode == 1 and "rolled_back" in refused_publish.stderr, refused_publish
    assert not processes_naming(folder)


def test_the_night_s_table_is_plain_and_says_how_fast_and_how_big(folder):
    completed_process = run(folder, "night")
    assert completed_process.returncode == 0, completed_process
    assert completed_process.stdout.isascii() and "\x1b" not in completed_process.stdout
    lines = {line.split("  ")[0].strip(): line for line in completed_process.stdout.splitlines()}
    assert all(column in lines["step"] for column in ("what", "seconds", "rate", "size"))
    assert "entities/s" in lines["score"] and "iB/s" in lines["load"]
    assert "iB" in lines["index"] and "iB" in lines["quantize"]
    assert max(len(line.rstrip()) for line in lines.values()) < 150


def on_a_terminal(folder, *arguments, columns=100, interrupt_at=None):
    """(exit code, what a terminal showed) of a command; with `interrupt_at`, Ctrl-C when it shows that text."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        line = command(folder, *arguments)
        os.execve(line[0], line, environment(folder) | {"COLUMNS": str(columns)})  # noqa: S606
    terminal_output, give_up = b"", time.monotonic() + 120
    while time.monotonic() < give_up:
        ready, _, _ = select.select([master], [], [], 1.0)
        if not ready:
            continue
        try:
            piece = os.read(master, 65_536)
        except OSError:
            break
        if not piece:
            break
        terminal_output += piece
        if interrupt_at is not None and interrupt_at in terminal_output:
            os.write(master, b"\x03")
            interrupt_at = None
    _, status = os.waitpid(pid, 0)
    os.close(master)
    return os.waitstatus_to_exitcode(status), terminal_output.decode()


def test_a_night_on_a_terminal_fits_a_hundred_columns(folder):
    code, terminal_output = on_a_terminal(folder, "night")
    assert code == 0
    table = terminal_output[terminal_output.rindex("┏") :] if "┏" in terminal_output else terminal_output
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in table.splitlines()]
    assert max(map(len, lines)) <= 100
    assert "read interactions" in terminal_output and "/?" not in terminal_output


@pytest.mark.parametrize("moment", ["read interactions", "score shard"])
def test_ctrl_c_leaves_one_line_and_no_process(folder, moment):
    code, terminal_output = on_a_terminal(folder, "night", interrupt_at=moment.encode())
    assert code == 130
    assert terminal_output.count("interrupted;") == 1 and "Traceback" not in terminal_output
    assert poll_until(lambda: not processes_naming(folder))
    assert running_server(folder / "state") is None


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.6, 0.9, 1.2])
def test_an_interrupt_at_any_moment_shows_no_traceback(folder, after_s):
    process = subprocess.Popen(
        command(folder, "night"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=environment(folder),
    )  # fmt: skip
    with suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    was_running = process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    # A night that had finished before the signal says so. In the first tenths of a second Python has not yet installed
    # our signal handler.
    is_done = process.returncode == 0 and "retire" in output
    assert process.returncode == 130 or is_done or after_s < 0.1 or not was_running
    assert "Traceback" not in errors or after_s < 0.1, errors
    assert poll_until(lambda: not processes_naming(folder))


@pytest.fixture
def handlers():
    handler_by_signal = {
        signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    yield
    for signal_number, handler in handler_by_signal.items():
        signal.signal(signal_number, handler)


def test_an_unknown_exception_is_one_line_unless_debug_is_asked(folder, monkeypatch, capsys, handlers):
    def breaks(*_arguments, **_settings):
        raise ZeroDivisionError("[bold] division")

    monkeypatch.setattr(embed_items, "run", breaks)
    arguments = ["--config", str(folder / "larder.toml"), "score", "x"]

    assert program.main(arguments) == 1
    stderr = capsys.readouterr().err
    assert stderr.splitlines()[-1:] == [
        "internal error: ZeroDivisionError: [bold] division; run with --debug for the traceback"
    ]
    assert program.main(["--debug", *arguments]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_help_says_where_the_cut_and_the_state_come_from(folder):
    assert "newest change of an input" in " ".join(run_here(folder, "night", "--help").stdout.split())
    assert "keep their state in Redis" in " ".join(run_here(folder, "--help").stdout.split())
