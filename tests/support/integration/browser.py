"""A real browser without a window, driven over two pipes by its own protocol (headless Chromium, as Debian has it)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

NAME = "chromium"
AXE = Path(__file__).parent / "axe"
CALL_S = 30.0
# axe-core looks at the contrast of every element.
AXE_S = 100.0


class Browser:
    """One browser with one page. Raises FileNotFoundError if Chromium is not installed."""

    def __init__(self, directory: Path) -> None:
        program = shutil.which(NAME)
        if program is None:
            raise FileNotFoundError(f"this test needs {NAME}: apt-get install {NAME}")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        argv = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-proxy-server"]
        argv += ["--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={directory}"]
        # The browser reads commands from descriptor 3, and writes answers to descriptor 4.
        redirect = f"exec {' '.join(argv)} 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            ["bash", "-c", redirect],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._limit_s = CALL_S
        self._number = 0
        self._session = ""
        # Addresses that the page has asked for, and what the browser complains of.
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(CALL_S)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the browser's protocol."""
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._limit_s
        while True:
            heard = self._read(deadline)
            if heard.get("id") == number:
                assert "error" not in heard, heard
                result: dict[str, Any] = heard["result"]
                return result
            self._note(heard)

    def _note(self, heard: dict[str, Any]) -> None:
        params = heard.get("params", {})
        if heard.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif heard.get("method") == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif heard.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser has not answered for {self._limit_s:g} s"
            self._rest += os.read(self._in, 1 << 20)
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, url: str, width: int = 1366, height: int = 900, dark: bool = False) -> None:
        """Show a page."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """The value of an expression in the page, or what its promise resolves to."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of the first element that the selector finds; empty if there is none."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def sees_as(self, eyes: str) -> None:
        """From now on the page looks as to people with "protanopia", "deuteranopia", "tritanopia"; or "none"."""
        self.call("Emulation.setEmulatedVisionDeficiency", type=eyes)

    def pixel(self, selector: str, number: int = 0) -> str:
        """The colour in the middle of an element, as "#rrggbb"."""
        chosen = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        place = self.value(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])({chosen}.getBoundingClientRect())"
        )
        clip = {"x": place[0], "y": place[1], "width": 1, "height": 1, "scale": 1}
        png = base64.b64decode(self.call("Page.captureScreenshot", clip=clip)["data"])
        data, at = b"", 8
        while at < len(png):
            length = int.from_bytes(png[at : at + 4])
            data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
            at += length + 12
        # A byte for the filter, which changes nothing in the first pixel, then red, green, blue.
        return f"#{zlib.decompress(data)[1:4].hex()}"

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key, such as "Tab" (9) or "Enter" (13, with the text "\\r")."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def violations(self) -> list[str]:
        """Rules of accessibility that the page breaks, and where, as axe-core finds them."""
        self._limit_s = AXE_S
        self.call("Runtime.evaluate", expression=(AXE / "axe.min.js").read_text())
        script = """axe.run(document).then(found =>
            found.violations.map(one => one.id + ": " + one.nodes.slice(0, 3).map(node => node.html.slice(0, 120)
            + " " + node.any.map(check => check.message).join(" ")).join("; ")))"""
        found = self.value(script)
        self._limit_s = CALL_S
        assert isinstance(found, list), "axe-core has not run"
        return [str(one) for one in found]

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write the whole page, or what fits into the window, as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
