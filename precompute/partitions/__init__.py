"""Inputs of a night cut into shards by hash: the catalogue of items, users' histories, the sample held out.

Imports sources, bundles and erasures. Start at `catalogue`, then `partition`.
"""
