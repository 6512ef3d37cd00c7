"""Models: the bundle a team brings, the reference that is trained, and their int8 forms and indexes."""
