"""DAGs, a file each: what runs and when. The work itself is in `precompute`."""
