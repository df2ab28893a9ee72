"""`penstock lambda MODULE:HANDLER --queue NAME`: AWS Lambda's event source mapping, here."""

import signal
from argparse import ArgumentParser, Namespace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from penstock.cli.session import Session, UsageError, read_body_file
from penstock.cli.values import read_count, read_duration
from penstock.output import flush, print_text

if TYPE_CHECKING:
    from penstock.functions.mapping import InvokedBatch


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "function",
        metavar="MODULE:HANDLER",
        help="a handler of Python, or the http:// address of one in another language",
    )
    parser.add_argument(
        "--queue", required=True, metavar="NAME", help="its messages are the events"
    )
    parser.add_argument(
        "--batch-size", type=read_count, default=10, metavar="N", help="at most (default: 10)"
    )
    parser.add_argument(
        "--window",
        type=read_duration,
        default=0.0,
        metavar="DURATION",
        help="how long a batch may wait for more messages (default: 0s)",
    )
    parser.add_argument(
        "--concurrency", type=read_count, default=1, metavar="N", help="invocations at a time"
    )
    parser.add_argument(
        "--filter", metavar="FILE", help='filter criteria: {"Filters": [{"Pattern": "…"}]}'
    )
    parser.add_argument(
        "--report-failures",
        action="store_true",
        help="the function answers which messages failed (ReportBatchItemFailures)",
    )
    parser.add_argument(
        "--timeout",
        type=read_duration,
        default=3.0,
        metavar="DURATION",
        help="how long an invocation may take (default: 3s)",
    )
    parser.add_argument(
        "--burst",
        action="store_true",
        help="end when no message is visible any more; status 1 if any has failed",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Invokes the function until SIGTERM or Ctrl-C. Raises InvalidField and the store's errors."""
    # Imported here: other commands need none of it.
    from penstock.functions.filters import FilterCriteria, read_criteria
    from penstock.functions.invoke import HttpFunction, LambdaFunction, PythonFunction
    from penstock.functions.mapping import EventSourceMapping, MappingOptions

    if session.in_shell:
        raise UsageError("a function cannot be run within a shell")
    if not 0 < arguments.timeout <= 900:
        raise UsageError(f"--timeout: {arguments.timeout:g} s is outside 0 to 900 s")
    filters = FilterCriteria()
    if arguments.filter is not None:
        filters = read_criteria(read_body_file(arguments.filter))
    options = MappingOptions(
        arguments.batch_size,
        arguments.window,
        arguments.concurrency,
        arguments.report_failures,
        filters,
    )
    queues = session.queues(arguments)
    name: str = arguments.function
    function: LambdaFunction
    if name.startswith(("http://", "https://")):
        function = HttpFunction(name, arguments.timeout)
    else:
        function = PythonFunction(name, arguments.timeout)
    try:
        tell = partial(_tell, session, arguments)
        mapping = EventSourceMapping(queues, arguments.queue, function, options, tell)
        if arguments.burst:
            has_failed = False
            while (batch := mapping.poll()) is not None:
                has_failed |= batch.failed > 0
            return 1 if has_failed else 0

        def stop(number: int, frame: FrameType | None) -> None:
            mapping.end()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        mapping.run()
    finally:
        function.close()
    return 0


def _tell(session: Session, arguments: Namespace, batch: "InvokedBatch") -> None:
    """Prints what became of a batch."""
    if arguments.json:
        session.print_json(batch._asdict())
    else:
        parts = [f"{batch.messages - batch.failed} of {batch.messages} messages done"]
        if batch.filtered:
            parts.append(f"{batch.filtered} filtered out")
        if batch.error:
            parts.append(batch.error)
        print_text(", ".join(parts))
    flush()
