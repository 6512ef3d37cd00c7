"""Rendering of answers as bytes: one record or many, JSON and Arrow.

Start at `answer_fields`.
"""
