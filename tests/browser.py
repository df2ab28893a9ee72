"""A real Chromium for tests of pages, driven through chromedriver's own protocol."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

# Chromedriver picks a port that is free on IPv6, and ends if another program uses it on IPv4.
TRIES = 10
# Keys that are no characters, as the driver's protocol has them.
KEYS = {
    "Escape": "\ue00c",
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Space": " ",
    "Up": "\ue013",
    "Down": "\ue015",
}


def _chromedriver() -> tuple["subprocess.Popen[str]", str]:
    """A running driver, and the port at which it listens."""
    output = ""
    for _ in range(TRIES):
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert driver.stdout is not None
        for line in driver.stdout:
            output += line
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return driver, found[1]
        driver.communicate()
    raise AssertionError(f"chromedriver did not start in {TRIES} tries: {output}")


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
        # A new window shows a page of the browser's own, which sends requests.
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
        """Runs a script with these arguments (`arguments[0]` and so on); returns its result."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def texts(self, selector: str) -> list[str]:
        """The text of every element that the selector finds."""
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
        return self.run(script, selector)

    def prefer(self, scheme: str) -> None:
        """Emulates a system that prefers this colour scheme, "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._post("/goog/cdp/execute", command)

    def press(self, *keys: str) -> None:
        """Presses these keys of the keyboard, one after the other: characters, or KEYS."""
        actions = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self._post("/actions", {"actions": [source]})

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Emulates a screen of this size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._post("/goog/cdp/execute", command)

    def names(self) -> list[tuple[str, str]]:
        """What a screen reader is told of the page: the role and the name of each element."""
        command = {"cmd": "Accessibility.getFullAXTree", "params": {}}
        nodes = self._post("/goog/cdp/execute", command)["nodes"]
        return [
            (each["role"]["value"], each.get("name", {}).get("value", ""))
            for each in nodes
            if not each["ignored"]
        ]

    def screenshot(self) -> str:
        """What the window shows: a PNG, in base64."""
        shown: str = self._call("/screenshot")
        return shown

    def complaints(self) -> list[str]:
        """The messages in the browser's console since the last call."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Every URL that was requested since the last call."""
        entries = self._post("/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [each["params"] for each in events if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call(path, json.dumps(body).encode(), "POST")

    def _call(self, path: str, body: bytes | None = None, method: str = "GET") -> Any:
        request = Request(self._session + path, body, method=method)
        with urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]
