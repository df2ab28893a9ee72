"""Row 29: what is written for people has no character that a terminal acts on, nor forged lines."""

import io
import json
import logging
import sys

import pytest

from penstock.cli.show import joined, labelled, table
from penstock.output import (
    Lines,
    logger,
    overwrite_line,
    print_json,
    print_text,
    printable,
    printable_json,
    report,
)

# It clears the screen, sets a title, changes the direction of text, and forges a line of output.
HOSTILE = (
    "\x1b[2J\x1b]0;x\x07\x9b31m\x7f\r\nFORGED 1\x0b\x85FORGED 2\u2028FORGED 3"
    "\u202egnp\u2066\U000e0041"
)


def assert_harmless(text: str) -> None:
    """That a terminal prints nothing but lines of printable characters, none of them forged."""
    for line in text.split("\n"):
        assert line.replace("\t", "").isprintable(), ascii(line)
        assert not line.startswith("FORGED")


def test_every_character_that_is_not_printable_is_escaped_by_itself():
    assert printable("a\x1b[0mé\n\t\u202e\U000e0041") == r"a\x1b[0mé\n\t\u202e\U000e0041"
    assert printable("a\tb\nc\r", keep="\n\t") == "a\tb\nc\\r"
    assert printable(printable(HOSTILE)) == printable(HOSTILE)
    assert_harmless(printable(HOSTILE))


def test_json_keeps_its_value_and_has_no_character_that_a_terminal_acts_on():
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), 0xE0041, 0x1F600]))
    text = json.dumps({HOSTILE: every}, ensure_ascii=False)
    shown = printable_json(text)
    assert json.loads(shown) == {HOSTILE: every}
    assert_harmless(printable_json(json.dumps(HOSTILE, ensure_ascii=False)))


@pytest.mark.parametrize(
    "write",
    [print_text, report, overwrite_line, lambda text: print_json(json.dumps([text]))],
    ids=["print_text", "report", "overwrite_line", "print_json"],
)
def test_a_text_that_is_written_stays_on_its_line(write, capsys):
    write(HOSTILE)
    written = "".join(capsys.readouterr())
    assert_harmless(written.replace("\r\x1b[K", ""))
    assert written.count("\n") <= 1


def test_the_parts_of_tables_and_lists_cannot_begin_a_line(capsys):
    made = [
        table(("a", "b"), [(HOSTILE, "1"), ("x", HOSTILE)], left=2),
        labelled([("id", HOSTILE), ("body", HOSTILE)]),
        joined([HOSTILE, "second"]),
    ]
    assert [type(each) for each in made] == [Lines] * 3
    for each in made:
        print_text(each)
    assert_harmless(capsys.readouterr().out)
    assert (made[0].count("\n"), made[2].count("\n")) == (2, 1)


def test_nothing_is_written_by_a_process_without_stdout_and_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    for write in (print_text, report, overwrite_line, print_json):
        assert write("text") is None


class HostileError(Exception):
    """An error whose text comes from others."""


def test_an_entry_of_logging_has_no_forged_line_whatever_writes_it():
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    found = logger("penstock.test_output")
    found.addHandler(handler)
    try:
        found.warning("task %s: %s, %d", HOSTILE, HostileError(HOSTILE), 3)
        try:
            raise HostileError(HOSTILE)
        except HostileError:
            found.exception("%s failed", HOSTILE)
    finally:
        found.removeHandler(handler)
    assert logger("penstock.test_output").filters == found.filters
    assert len(found.filters) == 1
    lines = written.getvalue().splitlines()
    assert_harmless(written.getvalue())
    assert [line.split()[0] for line in lines if not line.startswith("  ")] == ["WARNING", "ERROR"]
    assert any(line.startswith("  ") and "HostileError" in line for line in lines)
