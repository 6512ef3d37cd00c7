"""Train the reference bundle from the configured interactions, and create an event of the asset `larder_bundle`.

When it runs: trigger it manually, or from the DAG that prepares the data; `data_until` (ISO 8601) leaves
later interactions out. Each success starts `nightly_precompute`. A team with its own model leaves this
DAG paused and lists `Asset("larder_bundle")` among the outlets of the task that writes the bundle.

What it needs: LARDER_CONFIG, with the sources and the folder of the bundle. The bundle is also copied
into the artefact store, from which hosts that did not train it read it. Training a million interactions
takes less than a minute and needs no GPU; the bundle is replaced atomically.
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
        """Fit the model, export it to ONNX, and write the bundle to where the night reads it."""
        from precompute.config.settings import night_config
        from precompute.reference.train import train_reference

        data_until = get_current_context()["params"]["data_until"]
        return train_reference(night_config(), data_until=data_until)

    train()


train_reference()
