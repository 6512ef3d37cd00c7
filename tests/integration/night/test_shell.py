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
from tests.polling import until

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
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS")}
    return {**kept, "HOME": str(folder), "TERM": "xterm-256color"}


def command(folder, *arguments):
    config = str(folder / "larder.toml")
    return [sys.executable, "-m", "precompute", "--config", config, *arguments]


def run(folder, *arguments):
    return subprocess.run(
        command(folder, *arguments), capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env=environment(folder),
    )  # fmt: skip


def run_here(folder, *arguments):
    """The same within this process."""
    config = str(folder / "larder.toml")
    return shell("--config", config, *arguments, environ=environment(folder))


def generation_of(done):
    assert done.returncode == 0, done
    return re.findall(r"\d{8}T\d{6}Z-[0-9a-f]{12}", done.stdout)[0]


def processes_naming(folder):
    """Command lines of the processes that mention this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


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
    begun = folder / f"artifacts/shell/generations/{generation}/work/begin.json"
    assert generation.startswith("19700102T000000Z")
    assert json.loads(begun.read_bytes())["interactions"] > 1000


def test_a_night_may_stop_before_its_publish(folder):
    done = run(folder, "night", "--until", "verify")
    told = " ".join(done.stdout.split())

    assert done.returncode == 0, done
    assert "is verified, and not published: `larder canary start" in told
    assert "publish" not in [line.split()[0] for line in done.stdout.splitlines() if line.split()]


def test_single_steps_work_one_by_one_without_a_redis(folder):
    generation = generation_of(run(folder, "begin"))
    for step in ("score", "index", "quantize", "load", "verify", "publish", "warm"):
        done = run(folder, step, generation)
        assert done.returncode == 0, (step, done)
    assert "live" in run(folder, "status").stdout
    assert "already" in run(folder, "night").stdout
    pinned = run(folder, "pin", generation, "--reason", "x")
    assert pinned.returncode == 0, pinned

    # A second one, published at once from its files, and back again.
    os.utime(folder / "interactions.parquet", (1_900_000_000, 1_900_000_000))
    second = generation_of(run_here(folder, "begin"))
    for step in ("score", "index", "quantize", "publish"):
        done = run_here(folder, step, second)
        assert done.returncode == 0, (step, done)
    back = run_here(folder, "roll-back", "--to", generation, "--reason", "x")
    assert back.returncode == 0 and generation in back.stdout, back
    again = run_here(folder, "publish", second)
    assert again.returncode == 1 and "rolled_back" in again.stderr, again
    assert not processes_naming(folder)


def test_the_night_s_table_is_plain_and_says_how_fast_and_how_big(folder):
    done = run(folder, "night")
    assert done.returncode == 0, done
    assert done.stdout.isascii() and "\x1b" not in done.stdout
    lines = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    assert all(word in lines["step"] for word in ("what", "seconds", "rate", "size"))
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
    shown, give_up = b"", time.monotonic() + 120
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
        shown += piece
        if interrupt_at is not None and interrupt_at in shown:
            os.write(master, b"\x03")
            interrupt_at = None
    _, status = os.waitpid(pid, 0)
    os.close(master)
    return os.waitstatus_to_exitcode(status), shown.decode()


def test_a_night_on_a_terminal_fits_a_hundred_columns(folder):
    code, shown = on_a_terminal(folder, "night")
    assert code == 0
    table = shown[shown.rindex("┏") :] if "┏" in shown else shown
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in table.splitlines()]
    assert max(map(len, lines)) <= 100
    assert "read interactions" in shown and "/?" not in shown


@pytest.mark.parametrize("moment", ["read interactions", "score shard"])
def test_ctrl_c_leaves_one_line_and_no_process(folder, moment):
    code, shown = on_a_terminal(folder, "night", interrupt_at=moment.encode())
    assert code == 130
    assert shown.count("interrupted;") == 1 and "Traceback" not in shown
    assert until(lambda: not processes_naming(folder))
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
    told, errors = process.communicate(timeout=60)
    # A night that was done before the signal came says so. In the first tenths of a second Python itself has not
    # come to us yet.
    is_done = process.returncode == 0 and "retire" in told
    assert process.returncode == 130 or is_done or after_s < 0.1 or not was_running
    assert "Traceback" not in errors or after_s < 0.1, errors
    assert until(lambda: not processes_naming(folder))


@pytest.fixture
def handlers():
    kept = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)


def test_an_unknown_exception_is_one_line_unless_debug_is_asked(
    folder, monkeypatch, capsys, handlers
):
    def breaks(*_arguments, **_settings):
        raise ZeroDivisionError("[bold] division")

    monkeypatch.setattr(embed_items, "run", breaks)
    arguments = ["--config", str(folder / "larder.toml"), "score", "x"]

    assert program.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "internal error: ZeroDivisionError: [bold] division; run with --debug for the traceback"
    ]
    assert program.main(["--debug", *arguments]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_help_says_where_the_cut_and_the_state_come_from(folder):
    assert "newest change of an input" in " ".join(
        run_here(folder, "night", "--help").stdout.split()
    )
    assert "keep their state in Redis" in " ".join(run_here(folder, "--help").stdout.split())
