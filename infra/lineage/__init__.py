"""Lineage of a night for OpenLineage: what each step reads and writes, with rows, bytes and the gates' verdicts.

`extractor` is named in Airflow's settings and nothing here imports it: without them all of it costs nothing. Imports
`cache`, `precompute` and Airflow's provider. Start reading at `step_datasets`.
"""
