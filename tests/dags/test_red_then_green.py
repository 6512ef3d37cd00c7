"""One run of the night that a gate turns red, and that is green after the fix, with readers in between."""

from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer
from infra.local.airflow import AirflowFailed
from precompute.steps.night import Night, run_night
from tests.dags.place import RUN_S, USERS, airflow_over, current_cut, states, write_interactions
from tests.integration.wholeness import assert_whole, moves
from tests.polling import poll_until

NIGHT = "nightly_precompute"


@pytest.mark.slow
def test_a_night_from_half_the_users_is_red_and_the_same_run_is_green_with_all_of_them(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    # given: a successful night, and a service with callers
    source = tmp_path / "interactions.csv"
    write_interactions(source, seed=7)
    with airflow_over(tmp_path, own_redis) as deployment:
        deployment.first_night()
        first = deployment.live
        with deployment.watched() as watch:
            # when: the next day's export is cut off half way
            cut = current_cut()
            write_interactions(source, seed=7, users=USERS // 2, more=60)
            run_id = deployment.airflow.trigger(NIGHT, {"data_until": cut})
            with pytest.raises(AirflowFailed):
                deployment.airflow.wait(NIGHT, run_id, RUN_S)

            # then: `verify` fails at its first try, and says what is wrong and which override would accept it
            red = deployment.airflow.report(NIGHT, run_id)
            tasks = {task.task_id: task for task in red.tasks}
            assert red.state == "failed"
            assert (tasks["verify"].state, tasks["verify"].try_number) == ("failed", 1)
            assert tasks["publish"].state == "upstream_failed"
            verify_log = deployment.airflow.task_log(red, "verify")
            assert "coverage_of_live" in verify_log and "the threshold 0.8" in verify_log, verify_log
            assert f"larder override {refused(verify_log)}" in verify_log, verify_log

            # and: callers got the old generation all the time
            watch.beat()
            assert deployment.live == first
            assert assert_whole(deployment.config) == first.generation
            watch.check_order([first.generation])

            # when: the complete file is there and the same run is cleared
            write_interactions(source, seed=7, more=60)
            twin = run_night(Night(deployment.twin, "twin", cut))
            second = twin[0][1].result_summary.split()[0]
            deployment.expect(watch, deployment.twin, second)
            deployment.airflow.clear(NIGHT, run_id)
            green = deployment.airflow.wait(NIGHT, run_id, RUN_S)

            # then: it succeeds and callers get the new generation
            assert states(green) == {"success"}
            assert assert_whole(deployment.config) == second
            assert poll_until(lambda: watch.seen_last == {second})
            watch.beat()
            watch.check_order(moves(deployment.config))


def refused(task_log: str) -> str:
    """The generation that a refusal is about."""
    return next(log_word for log_word in task_log.split() if log_word[8:9] == "T" and log_word[16:17] == "-")
