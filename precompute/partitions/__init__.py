"""Inputs of a night cut into shards by hash: the catalogue of items, users' histories, the sample held out.

Start at `catalogue` and `partition`.
"""
