"""`penstock capture PATH --queue NAME --last 1h`: what happened in a queue, for a test."""

import re
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from penstock.cli.session import Session, UsageError
from penstock.cli.values import read_duration, show_duration
from penstock.errors import InvalidField
from penstock.files import write_in
from penstock.journal import codec
from penstock.journal.slices import Redactor, SliceCutter, messages_of
from penstock.journal.store import open_reader
from penstock.output import counted, report

_TEST: Final = '''\
"""What happened in the queue {queue}: the same messages, in the same order, at the same times."""

from pathlib import Path

from penstock.testing import reproduce

SLICE = Path(__file__).with_name("{slice}")


def test_the_consumer_of_{name}_holds():
    seen = []

    def work(claim):
        # Call your consumer here.
        seen.append(claim.body)

    found = reproduce(SLICE, work)
    assert found.errors == []
    # What must hold in the end, such as: nothing was charged twice.
    assert len(seen) == found.deliveries
'''


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="a store or an archive (default: that of --url)"
    )
    parser.add_argument("--queue", required=True, metavar="NAME", help="the queue")
    parser.add_argument(
        "--last", type=read_duration, default=3_600.0, metavar="DURATION", help="(default: 1h)"
    )
    parser.add_argument("--archive", metavar="DIR", help="begin with the files archived there")
    parser.add_argument(
        "--redact", action="store_true", help="replace every value by another of its length"
    )
    parser.add_argument("--output", metavar="FILE", help="(default: NAME.slice, here)")
    parser.add_argument(
        "--pytest", action="store_true", help="write a test beside it, test_NAME_slice.py"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Writes the slice, and with --pytest a test; returns 1 if nothing happened in that time."""
    name = re.sub(r"\W", "_", arguments.queue)
    output = Path(arguments.output or f"{name}.slice")
    test = output.with_name(f"test_{name}_slice.py")
    if arguments.last <= 0:
        raise UsageError(f"--last: {arguments.last:g} s is no time; give 1h, for example")
    for path in (output, test) if arguments.pytest else (output,):
        if path.exists():
            raise UsageError(f"{path} exists already; remove it, or name another --output")
    if arguments.archive is not None and not Path(arguments.archive).is_dir():
        raise UsageError(f"--archive: {arguments.archive} is not a directory")
    span_ms = round(arguments.last * 1_000)
    from_ms = time.time_ns() // 1_000_000 - span_ms
    cutter = SliceCutter(arguments.queue, from_ms)
    with open_reader(session.path(arguments), arguments.archive) as reader:
        for entry in reader.entries(reader.first_offset):
            if entry.version == codec.VERSION:
                for each in reader.decoded(entry):
                    cutter.add(each.event)
        if reader.damage:
            raise InvalidField(
                f"{reader.path}: the journal is damaged; penstock check says where, and a slice "
                "of it could lack what matters"
            )
    cut = cutter.cut()
    if not cut.steps:
        report(
            f"nothing happened in {arguments.queue} in the last {show_duration(span_ms)}, as far "
            "as the journal still has it: give a longer --last, or an --archive"
        )
        return 1
    if arguments.redact:
        cut = Redactor().redacted(cut)
    write_in(output.parent, output.name, cut.encode())
    if arguments.pytest:
        text = _TEST.format(queue=arguments.queue, slice=output.name, name=name)
        write_in(test.parent, test.name, text.encode())
    messages, steps = len(messages_of(cut)), len(cut.steps)
    found = {"slice": str(output), "messages": messages, "steps": steps}
    told = f"{output}: {counted(messages, 'message')}, {counted(steps, 'step')}"
    session.print_result(arguments, found, told)
    return 0
