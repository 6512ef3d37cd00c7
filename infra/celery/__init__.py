"""Nights on one machine with Airflow's CeleryExecutor: broker, database, and one worker per queue."""
