"""Drive headless Chromium by its DevTools protocol over a pipe; no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A page in headless Chromium.

    Attributes:
        messages: Errors of scripts and of the console, and what the security policy refused.
    """

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        self.messages: list[str] = []
        self.number, self.session, self.buffer = 0, "", b""
        ours_in, out = os.pipe()
        given, ours_out = os.pipe()
        theirs_in, theirs_out = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (given, out))  # not 3 or 4
        os.close(given)
        os.close(out)
        options = [
            *("--headless=new", "--remote-debugging-pipe", "--hide-scrollbars", "--disable-gpu"),
            *("--no-sandbox", "--disable-dev-shm-usage"),  # which containers lack
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *(f"--user-data-dir={self.folder.name}", "about:blank"),
        ]
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", str(CHROMIUM), *options],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.reading, self.writing = ours_in, ours_out
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            part = os.read(self.reading, 1 << 20)
            assert part, "Chromium has ended"
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        method, details = answer.get("method"), answer.get("params", {})
        if method == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.messages.append(details["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(details["exceptionDetails"]))
        return answer

    def open(self, address: str) -> None:
        """Open an address in place of the present page."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition}\n{self.messages}\n{self.text()}"
            time.sleep(0.02)

    def text(self, selector: str = "body") -> str:
        """Return the visible text of the first element that a selector finds."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Click the first element that a selector finds."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        """Type into the focused element, letter by letter."""
        for letter in text:
            self.call("Input.dispatchKeyEvent", type="char", text=letter)

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key by its name, such as ``ArrowDown``."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
        code = codes.get(key, 40 if key == "ArrowDown" else ord(key[0].upper()))
        details = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else text, **details)
        self.call("Input.dispatchKeyEvent", type="keyUp", **details)

    def show_as(self, width: int = 1100, height: int = 800, dark: bool = False) -> None:
        """Set the size of the window, and the colours that the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])

    def photograph(self, file: Path) -> None:
        """Write what the window shows as a PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self.reading)
        os.close(self.writing)
        self.folder.cleanup()
