"""A replica as its features see it: the namespaces that it holds, and the hooks at which features attach.

Start at `hooks`.
"""
