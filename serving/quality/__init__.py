"""Quality of answers: samples of them scored again, drift of inputs and scores, what is read and what is not.

Imports serving.lookup, serving.usage and the rooms below them. Start at `monitor`.
"""
