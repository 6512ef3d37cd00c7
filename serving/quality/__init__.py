"""Quality of answers: samples of them scored again, drift of inputs and scores, what is read and what is not.

Start at `monitor`.
"""
