"""Makes the screenshots of the console in docs/images: `python -m tools.screenshots`.

A server in this process runs on a manual clock, so that an hour of a shop's work takes seconds and
every picture of it is alike. A real Chromium takes the pictures. The moving one, `demo`, is of a
real `penstock demo`: its console, whose button kills the server, and then what the demo printed.
"""

import asyncio
import base64
import io
import json
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

from PIL import Image

from penstock.backends.loop import result_of
from penstock.clock import ManualClock
from penstock.errors import PenstockError
from penstock.server.run import Running, start
from penstock.service import (
    PUSHER,
    Claim,
    Command,
    CreateQueue,
    Delete,
    PeekFrom,
    Pull,
    Push,
    Release,
)
from penstock.settings import ServerSettings
from tests.browser import Browser

IMAGES: Final = Path(__file__).resolve().parent.parent / "docs" / "images"
# 2026-11-19 09:00 UTC.
BEGIN_MS: Final = 1_795_078_800_000
STEP_S: Final = 5
STEPS: Final = 3_600 // STEP_S
# Queue, settings, pushes a step, pulls a step, share of the claims that fail, from which step on.
SHOP: Final[dict[str, tuple[dict[str, Any], float, float, float]]] = {
    "orders": ({"dead_letter": "orders-dead", "max_receives": 3}, 14, 16, 0.04),
    "mail": ({"dead_letter": "mail-dead", "max_receives": 2}, 6, 7, 0.75),
    "thumbnails": ({"visibility_ms": 20_000}, 5, 6, 0.01),
    "audit-events": ({}, 22, 17, 0.0),
    "invoices.fifo": ({"fifo": True}, 3, 4, 0.0),
    "webhooks": (
        {"visibility_ms": 15_000, "dead_letter": "webhooks-dead", "max_receives": 5},
        4,
        9,
        0.1,
    ),
    "nightly-export": ({}, 0.2, 0, 0.0),
    "search-index": ({}, 9, 11, 0.0),
    "refunds": ({}, 0.4, 3, 0.0),
}
WORKERS: Final = {
    "mail": ("mail-3 (pid 4102)", "mail-7 (pid 4121)"),
    "orders": ("orders-1 (pid 3987)",),
}
# What consumers of mail note with the messages that they do not deliver.
ERRORS: Final = ("SMTP 550: mailbox unavailable", "timeout after 30 s", "KeyError: 'address'", "")
WIDTH: Final = 1280
HEIGHT_MAX: Final = 1_180
# The moving picture: how long its demo runs, and when the button is pressed.
FILM_S: Final = 36
KILL_AT_S: Final = 8
FILM_BYTES_MAX: Final = 2_000_000
SHOW_TEXT: Final = """
const text = document.createElement("pre");
text.textContent = arguments[0];
text.style.cssText = "margin: 0; padding: 24px; font: 15px/1.5 monospace; white-space: pre-wrap";
document.body.style.margin = "0";
document.body.replaceChildren(text);
"""


class SimulatedShop:
    """A server and the producers and consumers of its queues."""

    def __init__(self, running: Running, clock: ManualClock) -> None:
        self._running = running
        self._clock = clock
        self._random = random.Random(7)
        self._held: list[tuple[int, Claim, bool]] = []
        self._number = 1_000

    async def do(self, command: Command[Any]) -> Any:
        return await result_of(self._running.service.submit(command))

    async def open(self) -> None:
        """Creates the queues."""
        for name, (settings, *_) in SHOP.items():
            await self.do(CreateQueue(name, settings))

    async def work(self, steps: int) -> None:
        """Pushes, pulls and deletes for so many steps of time."""
        for step in range(steps):
            self._clock.advance(seconds=STEP_S)
            await asyncio.sleep(0)
            for name, (_, pushes, pulls, failing) in SHOP.items():
                for _ in range(self._some(pushes)):
                    await self.do(self._push(name))
                await self._finish(step)
                claims = (
                    await self.do(
                        Pull(name, max(1, self._some(pulls)), wait_ms=0, holder=self._holder(name))
                    )
                    if pulls
                    else []
                )
                for claim in claims:
                    until = step + self._random.randint(0, 2)
                    self._held.append((until, claim, self._random.random() < failing))
            if step % (20 // STEP_S) == 0:
                await result_of(self._running.service.run(self._running.status.read()))

    async def _finish(self, step: int) -> None:
        due = [each for each in self._held if each[0] <= step]
        self._held = [each for each in self._held if each[0] > step]
        for _, claim, fails in due:
            try:
                if not fails:
                    await self.do(Delete(claim.queue, claim.proof))
                elif self._random.random() < 0.5:
                    await self.do(Release(claim.queue, claim.proof))
            except PenstockError:
                continue  # its claim ran out

    def _some(self, mean: float) -> int:
        whole = int(mean)
        return (
            whole
            + (self._random.random() < mean - whole)
            + self._random.randint(-whole // 3, whole // 3)
        )

    def _holder(self, name: str) -> str:
        workers = WORKERS.get(name, (f"{name}-1 (pid 4007)",))
        return f"worker {self._random.choice(workers)}"

    def _push(self, name: str) -> Push:
        self._number += 1
        body: dict[str, Any] = {
            "order": self._number,
            "customer": {"name": "Zoë Ångström", "vip": self._number % 5 == 0},
            "items": [{"sku": f"A-{self._random.randrange(999)}", "count": 2}],
        }
        error = self._random.choice(ERRORS) if name == "mail" else ""
        if error:
            body["error"] = error
        group = f"customer-{self._number % 7}" if name.endswith(".fifo") else None
        dedup_id = str(self._number) if group else None
        text = json.dumps(body, ensure_ascii=False).encode()
        attributes: dict[str, str | bytes] = {"kind": name.partition(".")[0]}
        context = {PUSHER: f"web-{self._number % 3 + 1} (pid 3911)"}
        return Push(
            name, text, dedup_id=dedup_id, group=group, attributes=attributes, context=context
        )


async def _take(pages: dict[str, str]) -> None:
    clock = ManualClock(BEGIN_MS)
    running = await start(ServerSettings(store="memory:?history=200000", port=0), clock)
    try:
        shop = SimulatedShop(running, clock)
        await shop.open()
        await shop.work(STEPS)
        if "message" in pages:
            letters = await shop.do(PeekFrom("mail-dead", 0, 1_000))
            pages["message"] = f"#/message/mail-dead/{letters[-1].id}"
        with tempfile.TemporaryDirectory() as profile:
            await asyncio.to_thread(_photograph, running.url, pages, Path(profile))
    finally:
        await running.stop()


def _photograph(url: str, pages: dict[str, str], profile: Path) -> None:
    with Browser(profile) as browser:
        for name, place in pages.items():
            for scheme in ("light", "dark") if name == "queues" else ("light",):
                browser.prefer(scheme)
                browser.resize(WIDTH, 800, is_phone=True)
                browser.visit("about:blank")
                browser.visit(f"{url}/console{place}")
                # The page has asked for everything that it shows, and drawn it.
                threading.Event().wait(2)
                browser.run(OPENED.get(name, ""))
                threading.Event().wait(1)
                height: int = browser.run("return document.querySelector('main').scrollHeight")
                browser.resize(WIDTH, min(height, HEIGHT_MAX), is_phone=True)
                threading.Event().wait(1)
                image = base64.b64decode(browser.screenshot())
                suffix = "" if scheme == "light" else "-dark"
                (IMAGES / f"console-{name}{suffix}.png").write_bytes(image)


def _film() -> None:
    """The moving picture: a demo as somebody sees it who presses the button."""
    words = [sys.executable, "-m", "penstock", "demo", "--no-browser", "--no-spark"]
    words += ["--seconds", str(FILM_S)]
    with (
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        ) as demo,
        tempfile.TemporaryDirectory() as profile,
        Browser(Path(profile), 1000, 700) as browser,
    ):
        assert demo.stdout is not None
        browser.prefer("light")
        browser.visit(f"{demo.stdout.readline().split()[1]}console")
        frames: list[tuple[bytes, int]] = []
        for second in range(FILM_S // 2):
            if second == KILL_AT_S:
                browser.run("document.getElementById('kill').focus()")
                frames.append((base64.b64decode(browser.screenshot()), 900))
                browser.run("document.getElementById('kill').click()")
            threading.Event().wait(0.6)
            frames.append((base64.b64decode(browser.screenshot()), 600))
        printed = demo.stdout.read()
        assert demo.wait() == 0, printed
        browser.visit("about:blank")
        browser.run(SHOW_TEXT, f"$ penstock demo\n\n{printed}")
        frames.append((base64.b64decode(browser.screenshot()), 6_000))
    images = [Image.open(io.BytesIO(png)).convert("RGB") for png, _ in frames]
    path = IMAGES / "demo.webp"
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[shown_ms for _, shown_ms in frames],
        loop=0,
        quality=70,
        method=4,
    )
    assert path.stat().st_size < FILM_BYTES_MAX


PAGES: Final = {
    "queues": "#/",
    "queue": "#/queue/orders",
    "message": "",
    "dead": "#/dead/mail-dead",
}
# What is done on a page before its picture is taken.
OPENED: Final = {
    "dead": "document.querySelectorAll('.groups summary')[1].click(); "
    "document.querySelectorAll('.groups input')[1].click()"
}


def main() -> None:
    """Makes all pictures, or those that are named."""
    wanted = sys.argv[1:] or [*PAGES, "demo"]
    if pages := {name: PAGES[name] for name in wanted if name != "demo"}:
        asyncio.run(_take(pages))
    if "demo" in wanted:
        _film()


if __name__ == "__main__":
    main()
