"""Schedules: by cron in a time zone, and by a period; each is pushed once by all workers together.

    penstock worker schedule:app --processes 3
    python schedule.py

It prints:

    nightly: 30 3 * * mon-fri Europe/Berlin
    pulse: every 1 s
    no pulse came twice
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from penstock.tasks import TaskApp

app = TaskApp(name="clockwork")
PULSES = Path("pulses.txt")
# How long the first pulse is waited for.
WORKER_S = 30


@app.task
def report(kind: str) -> None:
    """Would make a report every night."""


@app.task(ttl=30)
def pulse() -> None:
    """Adds a line to a file while `main` counts them."""
    # "r+", unlike "a", makes no file.
    with suppress(FileNotFoundError), PULSES.open("r+") as file:
        file.seek(0, os.SEEK_END)
        file.write("pulse\n")


app.schedule("nightly", "30 3 * * mon-fri", report.prepare("sales"), timezone="Europe/Berlin")
app.schedule("pulse", 1, pulse, missed="skip")


def main() -> None:
    """Prints the schedules, and counts the pulses of some seconds."""
    for name, schedule in app.schedules.items():
        print(f"{name}: {schedule.shown}")
    PULSES.write_text("")
    began_s = time.time()
    try:
        while (count := len(PULSES.read_text().splitlines())) < 3:
            if not count and time.time() > began_s + WORKER_S:
                sys.exit("no pulse came: start a worker, penstock worker schedule:app")
            time.sleep(0.1)
        seconds = int(time.time()) - int(began_s)
    finally:
        PULSES.unlink()
    # A pulse that was due just before the start may be counted too.
    is_once = count <= seconds + 1
    print("no pulse came twice" if is_once else f"{count} pulses in {seconds} s")


if __name__ == "__main__":
    main()
