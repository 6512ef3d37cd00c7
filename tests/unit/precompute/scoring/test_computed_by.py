"""What a result was computed by: another processor, or another version of a library, makes another answer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from precompute.scoring.programs import computed_by, instructions_digest

Says = Callable[[str | None], str]


@pytest.fixture
def digest_of(monkeypatch: pytest.MonkeyPatch) -> Says:
    """The digest on a machine whose /proc/cpuinfo has this text; None: it has no such file."""

    def digest(text: str | None) -> str:
        def read_text(path: Path, *_arguments: object) -> str:
            if text is None or path != Path("/proc/cpuinfo"):
                raise FileNotFoundError(path)
            return text

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", read_text)
            return instructions_digest.__wrapped__()

    return digest


def test_instructions_make_the_digest_in_whatever_order_they_stand(digest_of: Says) -> None:
    reference_digest = digest_of("processor\t: 0\nflags\t\t: fpu avx2 sse2\n")

    assert digest_of("processor\t: 7\nflags\t\t: sse2 avx2 fpu\nbugs\t: some\n") == reference_digest
    assert digest_of("processor\t: 0\nflags\t\t: fpu avx512f sse2\n") != reference_digest
    assert digest_of("Features\t: fpu avx2 sse2\n") != digest_of("Features\t: asimd\n")


def test_a_machine_that_does_not_list_them_goes_by_its_name(digest_of: Says) -> None:
    assert digest_of(None) == digest_of("processor\t: 0\n")
    assert digest_of(None) != digest_of("flags\t: fpu\n")


def test_the_digest_is_short_enough_for_a_line(digest_of: Says) -> None:
    assert len(digest_of("flags\t: fpu\n")) == 8
    assert f"processor {instructions_digest()}" in computed_by()
