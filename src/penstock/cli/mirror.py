"""`penstock mirror --from file:PATH --to URL`: mirrors a store to another service.

It runs beside the process that holds the store, reads the store's journal, and repeats its events
on the queues of the other service: it creates and removes queues, pushes messages, hides them while
they are claimed, and deletes them. Events that it has not repeated yet stay in the journal.
"""

import os
import signal
import threading
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

from penstock.backends.mirror.follow import MirrorFollower, MirrorProgress
from penstock.backends.mirror.service import (
    NAME,
    MirrorThread,
    check_mirror,
)
from penstock.backends.mirror.state import check_primary, check_start, read_state, target_of
from penstock.cli.session import Session, UsageError, check_exists
from penstock.cli.values import read_duration, show_size
from penstock.journal.store import open_reader
from penstock.output import flush, report
from penstock.url import BackendUrl, load_backend, read_url, store_url

_NICE: Final = 19


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "--from",
        dest="primary",
        metavar="PATH",
        help="the store to mirror (default: the store of --url)",
    )
    parser.add_argument(
        "--to", metavar="URL", help="the service to mirror to, such as amqp://localhost"
    )
    parser.add_argument(
        "--name", default=NAME, metavar="NAME", help="the name of the mirror (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="end when all events are mirrored")
    parser.add_argument("--status", action="store_true", help="show how far the mirror is behind")
    parser.add_argument(
        "--every",
        type=read_duration,
        default=10.0,
        metavar="DURATION",
        help="print figures at this interval (default: %(default)g s)",
    )
    parser.add_argument(
        "--moved", action="store_true", help="--to is the same service at a new address"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Mirrors until stopped."""
    if arguments.primary is None:
        arguments.primary = session.url(arguments)
    else:
        session.refuse_option(arguments, "url", "there is --from, too; give one of them")
        arguments.primary = store_url(arguments.primary)
    check_primary(arguments.primary)
    primary = read_url(arguments.primary)
    if arguments.to is None and not arguments.status:
        raise UsageError("give --to URL, the service to mirror to (see penstock mirror --help)")
    check_exists(arguments.primary)
    if arguments.status:
        return _show_status(session, arguments, primary.path)
    mirror = read_url(store_url(arguments.to))
    check_mirror(primary, mirror)
    check_start(primary.path, arguments.name, target_of(mirror), has_moved=arguments.moved)
    if arguments.once:
        return _run_once(session, arguments, primary, mirror)
    if session.in_shell:
        raise UsageError("within a shell a mirror needs --once")
    thread = MirrorThread(primary.path, mirror, arguments.name, has_moved=arguments.moved)
    return _run_until_stopped(session, arguments, thread)


def _run_once(
    session: Session, arguments: Namespace, primary: BackendUrl, mirror: BackendUrl
) -> int:
    """Mirrors all events that are durable now; while the service is unreachable, says so."""
    waiting = _WaitingLine(arguments.every)

    def pause(seconds: float) -> None:
        waiting.show(follower.progress.error)
        time.sleep(seconds)

    follower = MirrorFollower(
        primary.path,
        load_backend(mirror).open_service(mirror, None),
        arguments.name,
        pause,
        target=target_of(mirror),
        has_moved=arguments.moved,
    )
    try:
        follower.start()
        follower.catch_up()
        _show(session, arguments, follower.progress)
    finally:
        follower.close()
    return 0


class _WaitingLine:
    """Prints on stderr what the mirror waits for, not more often than `every_s`."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_s = 0.0

    def show(self, error: object) -> None:
        """Prints the error, if there is one and it is time for a line."""
        now_s = time.monotonic()
        if error is not None and now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            report(f"waiting: {error}")


def _run_until_stopped(session: Session, arguments: Namespace, thread: MirrorThread) -> int:
    # The store's process goes first: events can wait in the journal.
    os.nice(_NICE)
    stop_requested = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_requested.set())
    shown_s = time.monotonic() - arguments.every
    waiting = _WaitingLine(arguments.every)
    try:
        while not stop_requested.wait(0.2) and thread.failure is None:
            if time.monotonic() - shown_s >= arguments.every:
                shown_s = time.monotonic()
                progress = thread.progress
                if progress is not None:
                    _show(session, arguments, progress)
            if thread.progress is None:
                waiting.show(thread.error)
    finally:
        thread.stop()
    if thread.progress is not None:
        _show(session, arguments, thread.progress)
    if thread.failure is not None:
        raise thread.failure
    return 0


def _show(session: Session, arguments: Namespace, progress: MirrorProgress) -> None:
    figures: dict[str, Any] = progress._asdict()
    text = (
        f"{show_size(progress.behind_bytes)} behind ({progress.behind_ms / 1_000:.1f} s), "
        f"{progress.pushed} pushed, {progress.deleted} deleted, {progress.refused} refused, "
        f"{progress.unmatched} not found"
    )
    if progress.error is not None:
        text += f"; {progress.error}"
    session.print_result(arguments, figures, text)
    flush()


def _show_status(session: Session, arguments: Namespace, path: str) -> int:
    """Prints the state that the mirror saved last; returns 1 if there is none."""
    with open_reader(path) as reader:
        durable = reader.durable_offset
    state = read_state(Path(path), arguments.name)
    if state is None:
        text = f"{path}: no mirror with the name {arguments.name!r} was started"
        report(text)
        return 1
    behind_bytes = max(0, durable - state.position)
    figures = {
        "name": arguments.name,
        "position": state.position,
        "behind_bytes": behind_bytes,
        "is_complete": state.is_complete,
        "queues": len(state.queues),
        "missing": sum(map(len, state.missing.values())),
        "target": state.target or None,
    }
    where = f" to {state.target}" if state.target else ""
    copied = "" if state.is_complete else ", and the first copy is not finished"
    session.print_result(
        arguments, figures, f"{arguments.name}{where}: {show_size(behind_bytes)} behind{copied}"
    )
    return 0
