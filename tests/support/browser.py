"""A page in headless Chromium, driven by its DevTools protocol over two pipes, which takes no library."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--no-first-run", "--no-default-browser-check", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str | None:
    """Path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running Chromium with one page, and what that asked for and complained of since it was opened."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb", buffering=0), os.fdopen(back, "rb", buffering=0)
        self._number = 0
        self._session: str | None = None
        self._left = b""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, path: Path, size: tuple[int, int], *, dark: bool = False, draws: bool = True) -> None:
        """Open a file of HTML, and wait until it has loaded and (if it ``draws``) drawn."""
        self.requests, self.complaints, self._loaded = [], [], False
        width, height = size
        is_phone = width < 600
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )  # fmt: skip
        self.set_scheme(dark=dark)
        self._ask("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._take(self._receive())
        if draws:
            self.settle()

    def set_scheme(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def settle(self) -> None:
        """Wait for two frames, in which all that waits for one is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def run_scripts(self, *, on: bool) -> None:
        self._ask("Emulation.setScriptExecutionDisabled", value=not on)

    def press(self, kind: str, x: float, y: float) -> None:
        """Send an event of the mouse: ``mousePressed``, ``mouseMoved`` or ``mouseReleased``."""
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def _ask(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._take(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = self._back.read(2**16)
            assert more, "Chromium has ended"
            self._left += more
        message, self._left = self._left.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _take(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(f"{method}: {values}")


@contextlib.contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Run Chromium for as long as the context lasts."""
    read_by_it, to = os.pipe()
    back, written_by_it = os.pipe()

    def wire() -> None:
        # It reads from 3 and writes to 4; these may be the ends of ours.
        high_in, high_out = os.dup(read_by_it), os.dup(written_by_it)
        os.dup2(high_in, 3)
        os.dup2(high_out, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={profile}"], close_fds=False, preexec_fn=wire,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_by_it)
        os.close(written_by_it)
        try:
            yield Browser(to, back)
        finally:
            process.kill()
            process.wait()
