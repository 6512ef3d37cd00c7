"""HTTP: connections within bounds, the ASGI application, its routes, and the OpenAPI document of them.

Start at `routes`.
"""
