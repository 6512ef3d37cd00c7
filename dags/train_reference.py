"""Train the reference bundle from the configured interactions, and announce it as `larder_bundle`.

When it runs: by hand, or from whatever prepares the data; `data_until` (ISO 8601) leaves later
interactions out. Each success starts `nightly_precompute`. A team with a model of its own leaves
this DAG paused and lists `Asset("larder_bundle")` among the outlets of the task that writes its
bundle.

What it needs: LARDER_CONFIG, with the sources and the folder of the bundle. The bundle is also put
into the artefact store, from where the night takes it on hosts that did not train it. Training takes under a
minute for a million interactions and no GPU; the bundle is replaced as a whole or not at all.
"""

from datetime import timedelta
from typing import Any

from airflow.sdk import Asset, Param, dag, get_current_context, task


@dag(
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={"data_until": Param(None, type=["null", "string"], format="date-time")},
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10), "execution_timeout": timedelta(hours=2)},
    doc_md=__doc__,
    tags=["larder"],
)
def train_reference() -> None:
    @task(multiple_outputs=False, outlets=[Asset("larder_bundle")])
    def train() -> dict[str, Any]:
        """Fit, export to ONNX, and put the bundle where the night looks for it."""
        from precompute.config.settings import night_config
        from precompute.reference.train import train_reference

        data_until = get_current_context()["params"]["data_until"]
        return train_reference(night_config(), data_until=data_until)

    train()


train_reference()
