"""Near-match reuse of one table: the error that it may have, and the room for it."""

from typing import Annotated

from pydantic import Field

from cache.config.section import section


@section
class NearConfig:
    """Near-match reuse for inputs that no tier knows, in `[serving.near.TABLE]`; a table without a section has none.

    What was found for an input close by answers, marked `near`, where its error is shown to be within the bound.
    """

    error: Annotated[float, Field(ge=0.0001, le=0.5)] = 0.01
    """Share of the reused answers that may differ from live's: in the first label, or by more than `overlap` allows."""
    overlap: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of live's list that a reused one has at least, else it counts as different."""
    entries: Annotated[int, Field(ge=16, le=65_536)] = 2_048
    """Number of recent answers that are kept of each kind of input (history, features or both), of each worker: 4 bytes
    for each dimension of the vector, and 8 for each item of a list."""
