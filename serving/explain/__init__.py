"""The way of one answer: which sources were asked for an entity, what each said, and the record itself.

Imports serving.lookup and the rooms below it. Start at `explainer`.
"""
