"""Row of the command `take-events`, in a module without the command's imports."""

from precompute.config.commands import CommandRow
from precompute.config.console import CommandPlace

TAKE_EVENTS = CommandRow(
    "take-events",
    CommandPlace("events.taking.command", ("steps.take_events",)),
    "write the stream's new events into the store, where `begin` reads them",
    store_access="makes",
)
