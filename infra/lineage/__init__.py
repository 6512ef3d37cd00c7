"""OpenLineage lineage of a night: datasets that each step reads and writes, with rows, bytes and gate verdicts."""
