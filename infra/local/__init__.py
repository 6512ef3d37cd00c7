"""Airflow and the lookup service as processes that end with their `with` block, and a lock on a folder."""
