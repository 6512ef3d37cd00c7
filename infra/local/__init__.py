"""Programs on this machine for as long as a `with` block lasts: Airflow, the lookup service, and a lock on a folder."""
