"""The HTTP surface: the ASGI application, its routes, the token, OpenAPI.

Imports every room but fast_http and process. Start at `routes`.
"""
