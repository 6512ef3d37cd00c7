"""Model bundles with their vocabulary, the int8 forms of their models, and the indexes made from them.

Start at `bundle`.
"""
