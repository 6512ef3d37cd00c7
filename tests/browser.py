"""A headless Chromium, driven by its own protocol over a pipe: https://chromedevtools.github.io/devtools-protocol/.

The pipe needs no port and no package, and the browser ends when its other end is closed.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--force-color-profile=srgb", "--hide-scrollbars", "--lang=en-GB",
)  # fmt: skip
# Chromium reads commands from descriptor 3 and writes to 4; `_START` first moves the given ones out of their way.
_START = """
import os, sys
reads, writes = map(int, sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_FIRST_FREE = 10
_TAB = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
_ENTER = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
KEYS: dict[str, dict[str, Any]] = {"Tab": _TAB, "Enter": _ENTER}


def find_browser() -> str | None:
    """The Chromium to test with: LARDER_TEST_CHROMIUM (a name or path), else the first on PATH."""
    configured_program = os.environ.get("LARDER_TEST_CHROMIUM", "")
    if configured_program and shutil.which(configured_program) is None:
        raise FileNotFoundError(f"LARDER_TEST_CHROMIUM names no program: {configured_program}")
    return next(
        (
            program_path
            for name in ((configured_program,) if configured_program else NAMES)
            if (program_path := shutil.which(name))
        ),
        None,
    )


class BrowserError(RuntimeError):
    """The browser refused, or did not answer in time."""


class Browser:
    """One browser with one page; it keeps what console and network reported until `clear`."""

    def __init__(self, program: str, profile: Path, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
        theirs, self._write_fd = _pipe()
        self._in, browser_write_fd = _pipe()
        command = [program, *_FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs), str(browser_write_fd), *command],
            pass_fds=(theirs, browser_write_fd), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(browser_write_fd)
        self._number, self._unread, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(target for target in targets if target["type"] == "page")
            attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def call(self, method: str, **parameters: Any) -> Any:
        """Send one command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        give_up = time.monotonic() + self._timeout_s
        while (answer := self._read(give_up)).get("id") != self._number:
            if "method" in answer:
                self.events.append(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, after waiting for a promise."""
        evaluation = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in evaluation:
            raise BrowserError(json.dumps(evaluation["exceptionDetails"])[:2000])
        return evaluation["result"].get("value")

    def wait_until(self, script: str, timeout_s: float = 20.0) -> None:
        """Wait until an expression is true; the error shows its last value."""
        give_up = time.monotonic() + timeout_s
        while not (script_value := self.run(script)):
            if time.monotonic() > give_up:
                raise BrowserError(f"still {script_value!r} after {timeout_s} s: {script}")
            time.sleep(0.02)

    def open(self, url: str) -> None:
        """Open a page and wait until all of it is loaded; discard events of the page before."""
        self.clear()
        self.call("Page.navigate", url=url)
        self.wait_until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def clear(self) -> None:
        """Discard what console and network reported."""
        self.run("0")  # what is on its way belongs to what was before
        self.events.clear()

    def window(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """Set the size in CSS pixels (a phone's if narrow), and light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release one key."""
        key_event = {**KEYS[key], "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key_event)
        key_event.pop("text", None)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key_event)

    def write(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def keep(self, name: str) -> None:
        """Save a PNG of the whole page in the folder LARDER_TEST_SCREENSHOTS, if it is set."""
        if not (folder := os.environ.get("LARDER_TEST_SCREENSHOTS")):
            return
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        Path(folder, name).write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, exceptions, and what the browser itself logged."""
        self.run("0")
        messages = []
        for event in self.events:
            event_parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                messages.append(json.dumps(event_parameters["exceptionDetails"])[:500])
            elif event["method"] == "Runtime.consoleAPICalled" and event_parameters["type"] in (
                "error",
                "warning",
                "assert",
            ):
                messages.append(
                    " ".join(
                        str(console_argument.get("description", console_argument.get("value")))
                        for console_argument in event_parameters["args"]
                    )
                )
            elif event["method"] == "Log.entryAdded" and event_parameters["entry"]["level"] in ("error", "warning"):
                messages.append(f"{event_parameters['entry']['text']} {event_parameters['entry'].get('url', '')}")
        return messages

    def requested_urls(self) -> list[str]:
        """Return every URL that was requested."""
        self.run("0")
        request_events = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in request_events]

    def _read(self, give_up: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            remaining_s = give_up - time.monotonic()
            if remaining_s <= 0 or not select.select([self._in], [], [], remaining_s)[0]:
                raise BrowserError(f"no answer within {self._timeout_s} s")
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise BrowserError("the browser has ended")
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        decoded_message: dict[str, Any] = json.loads(message)
        return decoded_message

    def _stop(self) -> None:
        os.close(self._write_fd)
        os.close(self._in)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(3)
        with suppress(ProcessLookupError):  # renderers are of its session
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _pipe() -> tuple[int, int]:
    """Return the two ends of a pipe, both above the descriptors that the browser uses."""
    ends = os.pipe()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for descriptor in ends]
    for descriptor in ends:
        os.close(descriptor)
    return high[0], high[1]
