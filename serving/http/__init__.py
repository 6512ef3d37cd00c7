"""HTTP: bounded connections, the ASGI application, its routes, and their OpenAPI document.

Start at `routes`.
"""
