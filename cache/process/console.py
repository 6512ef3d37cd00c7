"""A console of rich on which no text steers the terminal; needs rich."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from cache.process.command_line import printable_lines


class SafeConsole(Console):
    """A console that shows the control characters of texts, and sends only those of its own styles."""

    def render_str(self, text: str, **options: Any) -> Text:
        """A text as all strings are drawn; escaped first, so that columns are as wide as what is shown."""
        return super().render_str(printable_lines(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of whatever is drawn, texts that are no strings included."""
        for segment in super().render(renderable, options):
            safe_text = segment.text if segment.control else printable_lines(segment.text)
            yield segment if safe_text == segment.text else Segment(safe_text, segment.style)
