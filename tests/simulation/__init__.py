"""A whole service in one process, under a seeded scheduler and a virtual clock: see `simulation`.

What is replaced, each at an interface that others declare, and held to what it replaces by `tests/contract`:

- the event loop (`asyncio.AbstractEventLoop`): time, connections and servers, in `virtual_loop` and `wires`;
- threads (`concurrent.futures.Executor`): `threads`, which pauses work between any two lines;
- clocks, sleeps and random numbers (`time`, `random`, `secrets`): `substitution`;
- Redis, behind its protocol: `redis_server`; the artefact store (`ArtefactStore`): `store`;
- a generation's files and its model (`Snapshot.open`): `nights`;
- what is compiled: `cache.native.pure`.

All else is what runs in production, from `serving.app` down, and the publisher's `precompute.releases`.
"""
