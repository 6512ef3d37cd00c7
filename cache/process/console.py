"""rich console that escapes control sequences in texts; requires rich."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from cache.process.command_line import printable_lines


class SafeConsole(Console):
    """Console that escapes control characters in texts; only its own styles produce control sequences."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string, escaped first, so that column widths match the output."""
        return super().render_str(printable_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable, of any type, with control characters escaped."""
        for segment in super().render(renderable, options):
            safe_text = segment.text if segment.control else printable_lines(segment.text)
            yield segment if safe_text == segment.text else Segment(safe_text, segment.style)
