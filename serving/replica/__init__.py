"""A running replica as its features see it: the namespaces that it holds, and the hooks at which they attach.

Start at `hooks`.
"""
