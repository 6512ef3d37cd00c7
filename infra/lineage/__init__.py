"""Lineage of a night for OpenLineage: what each step reads and writes, with rows, bytes and the gates' verdicts."""
