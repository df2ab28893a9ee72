"""The ledger of the shop: what each process was answered, written by itself, line by line.

A process writes a line before it asks for something and another when it was answered, each with
one system call, so a process that is killed leaves every line that it wrote.

    try ORDER          a push is asked for         sent ORDER            it was answered
    got ORDER MESSAGE  a message was delivered
    end ORDER MESSAGE  a delete is asked for       done ORDER MESSAGE    it was answered
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class LedgerLine(NamedTuple):
    """One line: when it was written, what was done, and of which order and message."""

    at_ns: int
    what: str
    order: str
    message: str


class ShopLedger:
    """The file of one process."""

    def __init__(self, directory: Path, name: str) -> None:
        path = directory / f"{name}-{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, order: str, message: str = "-") -> None:
        """Adds a line."""
        os.write(self._file, f"{time.monotonic_ns()} {what} {order} {message}\n".encode())


def read_ledger(directory: Path) -> Iterator[LedgerLine]:
    """The lines of all processes."""
    for path in sorted(directory.iterdir()):
        for line in path.read_text().splitlines():
            at_ns, what, order, message = line.split()
            yield LedgerLine(int(at_ns), what, order, message)


class ShopVerdict(NamedTuple):
    """What the ledger says, together with what is still in the queues.

    `unknown` are pushes without an answer. `again` counts deliveries of an order after its first:
    at least once allows them. `lost` and `came_back` must be empty.
    """

    sent: int
    unknown: int
    finished: int
    dead: int
    left: int
    again: int
    lost: list[str]
    came_back: list[str]

    @property
    def holds(self) -> bool:
        """Whether nothing that was answered was lost, or came back after its delete."""
        return not (self.lost or self.came_back)


def judge(directory: Path, dead: set[str], left: set[str]) -> ShopVerdict:
    """Compares the ledger with the orders that are dead letters, and those still in queues."""
    orders: dict[str, set[str]] = {what: set() for what in ("try", "sent", "end")}
    ended_ns: dict[str, int] = {}
    delivered: list[LedgerLine] = []
    for line in read_ledger(directory):
        orders.setdefault(line.what, set()).add(line.order)
        if line.what == "done":
            ended_ns[line.message] = line.at_ns
        elif line.what == "got":
            delivered.append(line)
    # A delete without an answer may have been done.
    finished = orders["end"]
    came_back = {
        line.order
        for line in delivered
        if line.message in ended_ns and line.at_ns > ended_ns[line.message]
    }
    return ShopVerdict(
        sent=len(orders["sent"]),
        unknown=len(orders["try"] - orders["sent"]),
        finished=len(finished),
        dead=len(dead),
        left=len(left),
        again=len(delivered) - len({line.order for line in delivered}),
        lost=sorted(orders["sent"] - finished - dead - left),
        came_back=sorted(came_back),
    )
