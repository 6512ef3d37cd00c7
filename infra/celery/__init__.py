"""The night with Airflow's CeleryExecutor on one machine: broker, database, and a worker per queue."""
