"""A real Chromium for tests of pages, driven through chromedriver's own protocol."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

TRIES = 10
"""It picks a port that is free on IPv6 and gives up if another has it on IPv4."""


def _chromedriver() -> tuple["subprocess.Popen[str]", str]:
    """A running driver, and the port at which it listens."""
    said = ""
    for _ in range(TRIES):
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert driver.stdout is not None
        for line in driver.stdout:
            said += line
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return driver, found[1]
        driver.communicate()
    raise AssertionError(f"chromedriver did not start in {TRIES} tries: {said}")


class Browser:
    """One window without a screen. Use it as a context manager."""

    def __init__(
        self, profile: Path, width: int = 1280, height: int = 900, flags: Sequence[str] = ()
    ) -> None:
        self._profile = profile
        self._flags = flags
        self._size = width, height

    def __enter__(self) -> "Browser":
        self._driver, port = _chromedriver()
        self._session = f"http://127.0.0.1:{port}/session"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += [
            f"--user-data-dir={self._profile}",
            f"--window-size={','.join(map(str, self._size))}",
            *self._flags,
        ]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": flags},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._post("", {"capabilities": {"alwaysMatch": wanted}})
        self._session += f"/{made['sessionId']}"
        # A new window opens with a page of the browser's own, which asks for much.
        self._post("/url", {"url": "about:blank"})
        self.requests()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("", method="DELETE")
        finally:
            self._driver.terminate()
            self._driver.communicate()

    def open(self, page: Path) -> None:
        """Shows a file, and waits until it is loaded."""
        self.visit(page.as_uri())

    def visit(self, url: str) -> None:
        """Shows a page, and waits until it is loaded."""
        self._post("/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of script returns; `arguments[0]` and so on are given to it."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def texts(self, selector: str) -> list[str]:
        """The text of every element that the selector finds."""
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
        return self.run(script, selector)

    def prefer(self, scheme: str) -> None:
        """Lets the system prefer the light or the dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._post("/goog/cdp/execute", command)

    def complaints(self) -> list[str]:
        """What the console was told since the last time."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Every address that was asked for since the last time."""
        entries = self._post("/se/log", {"type": "performance"})
        told = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [each["params"] for each in told if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call(path, json.dumps(body).encode(), "POST")

    def _call(self, path: str, body: bytes | None = None, method: str = "GET") -> Any:
        request = Request(self._session + path, body, method=method)
        with urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]
