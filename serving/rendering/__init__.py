"""Answers as bytes: one record, many records, JSON and Arrow.

Imports serving.generations and serving.arrow_ipc. Start at `answer_fields`.
"""
