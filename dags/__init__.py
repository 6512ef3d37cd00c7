"""Airflow DAGs, one in each file. Their tasks call the steps in `precompute`."""
