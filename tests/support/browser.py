"""A headless Chromium for tests, driven through chromedriver by the W3C WebDriver protocol."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

START_S = 30.0
CALL_S = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "no chromium with its chromedriver on PATH"
"""Why there is no browser here."""


class Browser:
    """One window."""

    def __init__(self, address: str, profile: Path):
        self._address = address
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {
                "binary": CHROMIUM,
                "args": [*FLAGS, f"--user-data-dir={profile}"],
            },
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, page: Path | str) -> None:
        """A file, or an address."""
        self._post("/url", {"url": page if isinstance(page, str) else page.resolve().as_uri()})

    def resize(self, width: int, height: int) -> None:
        self._post("/window/rect", {"width": width, "height": height})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the function body `script` returns."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """What a user reads in the first element."""
        told = self.run("return document.querySelector(arguments[0]).innerText", selector)
        assert isinstance(told, str)
        return told

    def texts(self, selector: str) -> list[str]:
        script = (
            "return [...document.querySelectorAll(arguments[0])]"
            ".map((e) => e.innerText ?? e.textContent)"  # text in an image has the second only
        )
        found = self.run(script, selector)
        assert isinstance(found, list)
        return found

    def click(self, selector: str) -> None:
        self._post(f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, keys: str) -> None:
        """In place of what a field holds; elements that hold nothing get the keys."""
        element = self._find(selector)
        if self.run("return document.querySelector(arguments[0]).matches('input')", selector):
            self._post(f"/element/{element}/clear", {})
        self._post(f"/element/{element}/value", {"text": keys})

    def hover(self, selector: str, x: float, y: float) -> None:
        """Moves the mouse to a fraction of the element's width and height."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        box = self.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]",
            selector,
        )
        at = {"x": round(box[0] + x * box[2]), "y": round(box[1] + y * box[3])}
        move = {"type": "pointerMove", "duration": 0, "origin": "viewport", **at}
        mouse = {"type": "pointer", "id": "mouse", "actions": [move]}
        self._post("/actions", {"actions": [mouse]})

    def errors(self) -> list[str]:
        """Errors and warnings of the console since the last time."""
        told = self._post("/se/log", {"type": "browser"})
        return [each["message"] for each in told if each["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last time."""
        told = [
            json.loads(e["message"])["message"]
            for e in self._post("/se/log", {"type": "performance"})
        ]
        return [
            each["params"]["request"]["url"]
            for each in told
            if each["method"] == "Network.requestWillBeSent"
        ]

    def emulate(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._post("/goog/cdp/execute", command)

    def phone(self, width: int | None) -> None:
        """Shows pages as a phone of this many pixels does (a window is wider); None: no more."""
        if width is None:
            self._post(
                "/goog/cdp/execute", {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}}
            )
            return
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        self._post("/goog/cdp/execute", command)

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """The window, or the whole page."""
        params = {"format": "png", "captureBeyondViewport": whole}
        command = {"cmd": "Page.captureScreenshot", "params": params}
        told = self._post("/goog/cdp/execute", command)
        file.write_bytes(base64.b64decode(told["data"]))

    def quit(self) -> None:
        self._ask("DELETE", self._session, None)

    def _find(self, selector: str) -> str:
        found = self._post("/element", {"using": "css selector", "value": selector})
        (name,) = found.values()
        return str(name)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", self._session + path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urlopen(request, timeout=CALL_S) as answer:
            return json.load(answer)["value"]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, which ends with the block."""
    assert DRIVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address)
        window = Browser(address, profile)
        try:
            yield window
        finally:
            window.quit()
    finally:
        driver.terminate()
        driver.wait(10)


def _wait_for(address: str) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            with urlopen(f"{address}/status", timeout=CALL_S) as answer:
                if json.load(answer)["value"]["ready"]:
                    return
        except (URLError, ConnectionError):
            pass
        assert time.monotonic() < end, f"chromedriver did not start in {START_S} s"
        time.sleep(0.05)
