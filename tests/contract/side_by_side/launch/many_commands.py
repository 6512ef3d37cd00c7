"""Commands of `larder` of any checkout, one after the other in one process: argument lists in, outcomes out, as JSON.

LARDER_CHECKOUT names the checkout. What a program of its own would cost in imports, a list of commands costs once.
"""

import contextlib
import io
import json
import os
import sys
from typing import Any


def main() -> None:
    """Run the commands given on standard input; print the list of outcomes."""
    sys.path.insert(0, os.environ["LARDER_CHECKOUT"])
    from infra.cli.__main__ import main as larder

    outcomes: list[dict[str, Any]] = []
    environ = dict(os.environ)
    for arguments in json.load(sys.stdin):
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                code: Any = larder(arguments)
            except SystemExit as stop:
                code = stop.code
        os.environ.clear()
        os.environ.update(environ)
        outcomes.append(
            {"words": arguments, "code": code or 0, "output": output.getvalue(), "errors": errors.getvalue()}
        )
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
