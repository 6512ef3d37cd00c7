"""Inputs of a night, divided into shards by hash: item catalogue, users' histories and features, holdout sample.

Start at `catalogue` and `partition`.
"""
