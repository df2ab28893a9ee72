"""`penstock push --from FILE`: push the messages that `pull`, `peek` or `export` have printed.

The file is read twice: nothing is pushed until every line is known to be a message and its queue
to exist. What the store then refuses, such as a message for a full queue, is named by its line.
"""

import shutil
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Final

from penstock.cli.message_lines import LINE_BYTES_MAX, check_fits, read_push
from penstock.cli.progress import Progress
from penstock.cli.session import Session, UsageError
from penstock.cli.show import reply_as_json
from penstock.client import Queues
from penstock.errors import PenstockError, RequestError
from penstock.output import counted, print_text, report
from penstock.service import Batch, DescribeQueue, Push, QueueSettings

_BATCH_MAX: Final = 500
_BATCH_BYTES: Final = 1024 * 1024
_BAD_SHOWN: Final = 10


def push_from(session: Session, arguments: Namespace) -> int:
    """Pushes every line of the file. Raises UsageError, RequestError and the store's errors."""
    for option in ("delay", "priority", "ttl", "dedup_id", "group", "attribute"):
        if getattr(arguments, option):
            flag = option.replace("_", "-")
            raise UsageError(f"--{flag}: with --from, each line has its own")
    with _opened(session, arguments.file) as file:
        queues = session.queues(arguments)
        now_ms = time.time_ns() // 1_000_000
        count = _check(file, arguments, queues, now_ms)
        file.seek(0)
        return _push(session, arguments, queues, _pushes(file, arguments.queue, now_ms), count)


@contextmanager
def _opened(session: Session, path: str) -> Iterator[IO[bytes]]:
    """The file; what can be read only once, such as stdin, is copied first. Raises UsageError."""
    with ExitStack() as opened:
        try:
            given: IO[bytes] = (
                session.stdin() if path == "-" else opened.enter_context(open(path, "rb"))
            )
            if path == "-" or not given.seekable():
                copy = opened.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(given, copy)
                copy.seek(0)
                given = copy
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"--from: cannot read {path!r}: {reason}") from None
        yield given


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers; empty ones are left out."""
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if line.strip():
            yield number, line


def _pushes(file: IO[bytes], queue: str | None, now_ms: int) -> Iterator[tuple[int, Push]]:
    for number, line in _lines(file):
        try:
            yield number, read_push(line, queue, now_ms)
        except RequestError as error:
            raise type(error)(f"line {number}: {error}; the file has changed meanwhile") from None


def _check(file: IO[bytes], arguments: Namespace, queues: Queues, now_ms: int) -> int:
    """Counts the messages in the file. Raises RequestError if some cannot be pushed.

    Each of those is reported by its line.
    """
    settings: dict[str, QueueSettings | RequestError] = {}
    total = bad = 0
    for number, line in _lines(file):
        total += 1
        try:
            push = read_push(line, arguments.queue, now_ms)
            if push.queue not in settings:
                settings[push.queue] = _settings(queues, push.queue)
            found = settings[push.queue]
            if isinstance(found, RequestError):
                raise found
            check_fits(push, found)
        except RequestError as error:
            bad += 1
            if bad <= _BAD_SHOWN:
                report(f"{arguments.file}: line {number}: {error}")
    if bad:
        more = f" ({bad - _BAD_SHOWN:,} more than are shown)" if bad > _BAD_SHOWN else ""
        raise RequestError(
            f"{arguments.file}: {counted(bad, 'line')} of {total:,} cannot be pushed{more}; "
            "nothing was pushed"
        )
    return total


def _settings(queues: Queues, queue: str) -> QueueSettings | RequestError:
    try:
        return queues.service.execute(DescribeQueue(queue)).settings
    except RequestError as error:
        return error


def _push(
    session: Session,
    arguments: Namespace,
    queues: Queues,
    pushes: Iterator[tuple[int, Push]],
    total: int,
) -> int:
    pushed: Counter[str] = Counter()
    duplicates: Counter[str] = Counter()
    last = 0
    try:
        with Progress("push", total) as progress:
            for part in _batches(pushes):
                replies = queues.service.execute(Batch([push for _, push in part]))
                refused = []
                for (number, push), reply in zip(part, replies, strict=True):
                    if isinstance(reply, PenstockError):
                        refused.append((number, reply))
                        continue
                    pushed[push.queue] += 1
                    duplicates[push.queue] += reply.duplicate
                    if arguments.json:
                        session.print_json(reply_as_json(push.queue, reply))
                last = part[-1][0]
                progress.advance(len(part))
                if refused:
                    raise _refusal(arguments.file, refused)
    except (PenstockError, KeyboardInterrupt, OSError):
        sure = counted(sum(pushed.values()), "message")
        report(
            f"{arguments.file}: {sure} pushed, up to line {last}; no later line is known to be "
            "pushed"
        )
        raise
    if not arguments.json:
        for queue, count in pushed.items():
            known = duplicates[queue]
            note = f" ({known:,} of them were there already)" if known else ""
            print_text(f"{counted(count, 'message')} pushed to {queue}{note}")
    return 0


def _refusal(file: str, refused: list[tuple[int, PenstockError]]) -> PenstockError:
    for number, error in refused[1 : _BAD_SHOWN + 1]:
        report(f"{file}: line {number}: {error}")
    number, first = refused[0]
    return type(first)(f"{file}: line {number}: {first} (refused: {counted(len(refused), 'line')})")


def _batches(pushes: Iterator[tuple[int, Push]]) -> Iterator[list[tuple[int, Push]]]:
    part: list[tuple[int, Push]] = []
    size_bytes = 0
    for number, push in pushes:
        part.append((number, push))
        size_bytes += len(push.body)
        if len(part) == _BATCH_MAX or size_bytes >= _BATCH_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part
