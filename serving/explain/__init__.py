"""The way of one answer: which sources were asked for an entity, what each said, and the record itself.

Start at `explainer`.
"""
