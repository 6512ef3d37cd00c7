"""`python -m infra.celery`: runs the DAGs with CeleryExecutor on this machine until Ctrl-C."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from cache.errors import ConfigError, LarderError
from cache.process.command_line import interrupts_never_swallowed
from cache.process.redis_server import redis_url
from infra.celery.airflow import CONCURRENCY_BY_QUEUE, CeleryAirflow, absolute_folders, celery_airflow, check_installed
from infra.local.airflow import AirflowFailed
from precompute.config.settings import night_config

RUN_S_MAX = 12 * 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run Airflow; return 0 if the run succeeded, 1 on failure, 2 if a requirement is missing, 130 after a signal."""
    args = _parser().parse_args(argv)
    # Set SIGINT too: a shell starts background commands with SIGINT ignored.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.default_int_handler)
    try:
        with interrupts_never_swallowed():
            _serve(args)
    except KeyboardInterrupt:
        print("stopped; nothing is left running")
        return 130
    except ConfigError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 2
    except (AirflowFailed, LarderError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(args: argparse.Namespace) -> None:
    check_installed()
    environment = {"LARDER_CONFIG": str(args.config.absolute()), **absolute_folders(os.environ)}
    night_config(environment["LARDER_CONFIG"])
    with ExitStack() as exit_stack:
        redis_server_url = exit_stack.enter_context(redis_url(args.state, os.environ.get("REDIS_URL")))
        environment["REDIS_URL"] = redis_server_url
        print("starting: broker, PostgreSQL, Airflow, workers ...", flush=True)
        running_airflow = exit_stack.enter_context(celery_airflow(args.state, task_environment=environment))
        print(f"Airflow    {running_airflow.airflow.url}")
        print(f"queues     {', '.join(CONCURRENCY_BY_QUEUE)}: one worker each")
        print(f"REDIS_URL  {redis_server_url}")
        print(f"logs       {running_airflow.airflow.home / 'processes'}", flush=True)
        if args.run is not None:
            _run(running_airflow, args.run, {"data_until": args.data_until} if args.data_until else {})
            return
        print("running until Ctrl-C", flush=True)
        while True:
            _revive_workers(running_airflow)
            time.sleep(1.0)


def _run(running_airflow: CeleryAirflow, dag_id: str, run_parameters: Mapping[str, str]) -> None:
    run_id, give_up_at = running_airflow.airflow.trigger(dag_id, run_parameters), time.monotonic() + RUN_S_MAX
    while running_airflow.airflow.report(dag_id, run_id).state not in ("success", "failed"):
        if time.monotonic() > give_up_at:
            break
        _revive_workers(running_airflow)
        time.sleep(0.5)
    report = running_airflow.airflow.wait(dag_id, run_id, 0.0)
    for task in report.tasks:
        shard_text = f" [{task.map_index}]" if task.map_index >= 0 else ""
        tries_text = f" (try {task.try_number})" if task.try_number > 1 else ""
        print(f"  {task.duration_s:7.1f} s  {task.task_id}{shard_text} {task.state}{tries_text}")
    print(f"{dag_id} {report.state}: {report.duration_s:.1f} s")


def _revive_workers(running_airflow: CeleryAirflow) -> None:
    running_airflow.airflow.check()
    for queue, exit_code in running_airflow.workers.restart_dead_workers().items():
        print(f"the worker of the queue {queue} ended with exit code {exit_code} and was restarted", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infra.celery",
        description="Run the DAGs through Airflow's CeleryExecutor on this machine: a Redis broker, PostgreSQL, "
        "scheduler, API server, DAG processor and a worker for each of the queues default and gpu. "
        "Ctrl-C or TERM stops all of them.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        default=Path(os.environ.get("LARDER_CONFIG") or "larder.toml"),
        help="settings file of the night (default: LARDER_CONFIG, else larder.toml)",
    )  # fmt: skip
    parser.add_argument(
        "--state", type=Path, metavar="DIR", default=Path(".larder"),
        help="folder for logs and sockets (default: .larder)",
    )  # fmt: skip
    parser.add_argument("--run", metavar="DAG", help="run this DAG once, then stop")
    parser.add_argument(
        "--data-until", metavar="TIME",
        help="time from which data is left out, ISO 8601 (default: data_until of the settings, else now)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
