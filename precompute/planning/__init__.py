"""Forecast of a night's and its service's sizes, memory and times, from a sample of the real inputs.

Start at `forecast`.
"""
