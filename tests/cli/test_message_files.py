"""`export`, and `push --from`: messages as lines of JSON, out of one queue and into another."""

import base64
import json
import os
import pty
import subprocess
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import penstock
from penstock.cli.export import messages_of
from penstock.cli.message_lines import MessageLine
from penstock.cli.progress import Progress
from penstock.cli.show import message_as_json
from penstock.client import Queues
from penstock.clock import ManualClock
from penstock.service import REDRIVE_MAX, PeekFrom
from tests.cli.conftest import EXECUTABLE

TEXT = "Zoë \x1b[31m \u202e 🦆\nsecond line"


@pytest.fixture
def url(quick_path):
    """A store of two queues and a copy, with every kind of content."""
    url = f"file:{quick_path / 'shop'}?embedded=1"
    with penstock.connect(url) as queues:
        for name in ("orders", "mail", "copy"):
            queues.create(name)
        queues.push("orders", TEXT, priority=3, group="eu", attributes={"a": "1", "b": b"\xff"})
        queues.push("orders", b"\xff\x00", dedup_id="same")
        queues.push("orders", b"late", delay=3600)
        queues.push("mail", b"letter")
    return url


def write(path, *lines):
    path.write_text(
        "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines)
    )
    return path


def contents(results):
    names = ("body", "body_base64", "attributes", "attributes_base64", "priority", "group")
    return [[each.get(name) for name in names] for each in results]


def test_what_is_exported_can_be_pushed_and_exported_again(run_main, url, tmp_path):
    first = run_main("export", "orders", "--url", url)
    assert (first.status, first.err) == (0, "")
    assert len(first.results) == 3
    (tmp_path / "orders.jsonl").write_text(first.out)
    done = run_main("push", "copy", "--from", str(tmp_path / "orders.jsonl"), "--url", url)
    assert done.out == "3 messages pushed to copy\n"
    again = run_main("export", "copy", "--url", url)
    assert contents(again.results) == contents(first.results)
    assert [each["state"] for each in again.results] == ["visible", "visible", "delayed"]
    # The delay ends when it would have ended.
    ends = [each["visible_at_ms"] for each in (first.results[2], again.results[2])]
    assert abs(ends[0] - ends[1]) < 60_000


def test_claims_and_peeked_messages_can_be_pushed_to_the_queues_they_name(run_main, url, tmp_path):
    claims = run_main("pull", "orders", "-n", "2", "--json", "--url", url)
    peeked = run_main("peek", "mail", "--json", "--url", url)
    path = write(tmp_path / "some.jsonl", *claims.results, *peeked.results)
    done = run_main("push", "--from", str(path), "--url", url)
    # The copy of a message with a dedup id is known to the queue it came from.
    assert done.out == (
        "2 messages pushed to orders (1 of them were there already)\n1 message pushed to mail\n"
    )


def test_without_names_all_queues_are_exported_in_order_of_arrival(run_main, url):
    with penstock.connect(url) as queues:
        queues.push_many("mail", [str(number).encode() for number in range(1_200)])
        queues.pull_many("mail", 7)
    done = run_main("export", "--url", url)
    mail = [each for each in done.results if each["queue"] == "mail"]
    assert [each["queue"] for each in done.results] == [*["mail"] * 1_201, *["orders"] * 3]
    assert [each["body"] for each in mail] == ["letter", *map(str, range(1_200))]
    assert [each["state"] for each in mail[5:9]] == ["in_flight"] * 2 + ["visible"] * 2


def test_exporting_claims_nothing(run_main, url):
    run_main("export", "--url", url)
    with penstock.connect(url) as queues:
        assert queues.stats("orders").in_flight == 0
        assert queues.peek("orders")[0].receives == 0


class MovingService:
    """A store in which a message changes its state just before the reading of this number."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max = REDRIVE_MAX

    def __init__(self, service, at, change):
        self._service, self._at, self._change = service, at, change
        self.readings = 0

    def execute(self, command):
        if type(command) is PeekFrom:
            if self.readings == self._at:
                self._change()
            self.readings += 1
        return self._service.execute(command)

    def close(self):
        self._service.close()


def exported_while(change, at):
    """The bodies that are exported, and how many readings that took."""
    clock = ManualClock()
    with penstock.connect("memory:", clock=clock) as queues:
        queues.create("orders", visibility_timeout=30)
        queues.push("orders", b"x", delay=60 if change == "delay ends" else 0)
        is_held = change not in ("claimed", "delay ends")
        claim: Any = queues.pull("orders") if is_held else None
        changes = {
            "runs out": lambda: clock.advance(seconds=30),
            "released": lambda: queues.release(claim),
            "put off": lambda: queues.release(claim, delay=5),
            "claimed": lambda: queues.pull("orders"),
            "delay ends": lambda: clock.advance(seconds=60),
        }
        moving: Any = MovingService(queues.service, at, changes[change])
        found = [message.body for message, _ in messages_of(Queues(moving, clock), "orders")]
        return found, moving.readings


@pytest.mark.parametrize("change", ["runs out", "released", "put off", "claimed", "delay ends"])
def test_a_message_that_changes_its_state_meanwhile_is_printed_once(change):
    _, readings = exported_while(change, at=None)
    for at in range(readings):
        assert (at, exported_while(change, at)[0]) == (at, [b"x"])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense", "not a message in JSON: JSON is malformed: invalid character (byte 4)"),
        ("[1]", "not a message in JSON: Expected `object`, got `array`"),
        ({"bodi": "x"}, "not a message in JSON: Object contains unknown field `bodi`"),
        ({"queue": "copy"}, "body: give one of body and body_base64"),
        ({"body": "x", "body_base64": "eA=="}, "body: give one of body and body_base64"),
        ({"body_base64": "?"}, "not a message in JSON: Invalid base64 encoded string"),
        ({"body": "x", "priority": 10}, "priority: 10 is outside 0 to 9"),
        ({"body": "x", "group": "a\x1bb"}, "group: expected 1 to 128 printable characters"),
        (
            {"body": "x", "attributes": {"a": "1"}, "attributes_base64": {"a": ""}},
            "attributes: 'a' is in attributes_base64, too",
        ),
        ({"body": "x" * 2_000_000}, "body: 2000000 bytes; the queue 'copy' takes at most 1048576"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_pushed(run_main, url, tmp_path, line, why):
    path = write(tmp_path / "f.jsonl", {"body": "good"}, "", line, {"body": "good, too"})
    done = run_main("push", "copy", "--from", str(path), "--url", url)
    first, last = done.err.splitlines()
    assert first.startswith(f"penstock: {path}: line 3: {why}")
    assert last == f"penstock: {path}: 1 line of 3 cannot be pushed; nothing was pushed"
    assert (done.status, done.out) == (3, "")
    with penstock.connect(url) as queues:
        assert queues.stats("copy").messages == 0


def test_a_line_for_no_queue_or_a_missing_one_is_refused_before_anything_is_pushed(
    run_main, url, tmp_path
):
    path = write(
        tmp_path / "f.jsonl",
        {"body": "x", "queue": "copy"},
        {"body": "x"},
        {"body": "x", "queue": "copi"},
    )
    done = run_main("push", "--from", str(path), "--url", url)
    assert "line 2: queue: the line names none" in done.err
    assert "line 3: queue: there is no queue 'copi'" in done.err
    with penstock.connect(url) as queues:
        assert queues.stats("copy").messages == 0


def test_of_many_bad_lines_the_first_ten_are_shown(run_main, url, tmp_path):
    path = write(tmp_path / "f.jsonl", *["{}"] * 25)
    done = run_main("push", "copy", "--from", str(path), "--url", url)
    assert done.err.count(": line ") == 10
    assert "25 lines of 25 cannot be pushed (15 more than are shown)" in done.err


def test_what_the_store_refuses_is_named_with_what_was_pushed(run_main, url, tmp_path):
    with penstock.connect(url) as queues:
        queues.configure("copy", max_messages=700)
    path = write(tmp_path / "f.jsonl", *[{"body": str(number)} for number in range(2_000)])
    done = run_main("push", "copy", "--from", str(path), "--url", url)
    assert done.status == 3
    assert "line 701: queue: 'copy' is full" in done.err
    assert "(refused: 300 lines)" in done.err
    assert "700 messages pushed, up to line 1000; no later line is known to be pushed" in done.err
    with penstock.connect(url) as queues:
        assert queues.stats("copy").messages == 700


def test_lines_come_from_stdin_and_from_a_pipe_too(process, url):
    lines = b'{"body": "one"}\n{"body": "two"}\n'
    assert process("push", "copy", "--from", "-", "--url", url, stdin=lines).status == 0
    done = process("push", "copy", "--from", "/dev/stdin", "--url", url, stdin=lines)
    assert done.out == "2 messages pushed to copy\n"


def test_options_of_one_message_are_refused_for_a_file(run_main, url, tmp_path):
    path = write(tmp_path / "f.jsonl", {"body": "x"})
    done = run_main("push", "copy", "--from", str(path), "--dedup-id", "1", "--url", url)
    assert done.err == "penstock: --dedup-id: with --from, each line has its own\n"


@pytest.mark.parametrize(("path", "why"), [("missing", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_a_mistake_of_usage(run_main, url, tmp_path, path, why):
    done = run_main("push", "copy", "--from", str(tmp_path / path), "--url", url)
    assert (done.status, done.out) == (2, "")
    assert why in done.err


def test_a_store_without_pages_says_why_it_cannot_be_exported(shell):
    # Of the stores that need no server all have pages: every name in the output is a known field.
    done = shell("create q\npush q hello --attribute a=1\nexport q")
    printed = json.loads(done.out.splitlines()[-1])
    assert printed.keys() <= set(MessageLine.__struct_fields__)


def test_every_field_that_is_printed_is_a_field_that_can_be_read(cli):
    cli("create q")
    with penstock.connect("memory:") as queues:
        queues.create("q")
        queues.push("q", b"\xff", attributes={"a": b"\xff"})
        printed = message_as_json(queues.pull_many("q")[0])
    assert printed.keys() <= set(MessageLine.__struct_fields__)
    assert base64.b64decode(printed["body_base64"]) == b"\xff"


def test_the_line_of_progress_has_the_rate_and_the_time_left():
    progress = Progress("push", 1_000)
    assert progress.text(0.0) == "push ····················   0%, 0 of 1,000 messages"
    progress.done = 250
    assert progress.text(10.0) == (
        "push ━━━━━···············  25%, 250 of 1,000 messages, 25/s, 30s left"
    )
    progress.done = 1_500
    assert progress.text(10.0).endswith("100%, 1,500 of 1,500 messages, 150/s")


def test_progress_is_drawn_at_a_terminal_and_removed(url, tmp_path):
    path = write(tmp_path / "f.jsonl", *[{"body": str(number)} for number in range(3_000)])
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb", buffering=0) as screen:
        done = subprocess.run(
            [EXECUTABLE, "push", "copy", "--from", str(path), "--url", url],
            stdout=subprocess.PIPE, stderr=follower, timeout=60, check=True,
        )  # fmt: skip
        os.close(follower)
        drawn = b""
        try:
            while part := screen.read(65_536):
                drawn += part
        except OSError:
            pass  # the terminal has ended
    assert b"of 3,000 messages" in drawn
    assert drawn.endswith(b"\r\x1b[K")
    assert done.stdout == b"3,000 messages pushed to copy\n"
