"""Erasing an entity: which generations and hosts still hold it, and what is done until none does.

Imports erasures, partitions, releases and builds. Start at `erasing`.
"""
