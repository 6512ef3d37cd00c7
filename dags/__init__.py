"""One file per DAG: what runs and when. The work itself is in `precompute`."""
