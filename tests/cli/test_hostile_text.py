"""Row 29: hostile text in every field that a message, a task or a file can bring to a command."""

import json
import os
import re
import shutil

import msgspec
import pytest

import penstock
from penstock import cli
from penstock.journal.reader_positions import Reader
from penstock.service import Push
from penstock.tasks.envelope import Envelope, Failure, encode
from tests.tasks.conftest import Shop, until
from tests.test_output import HOSTILE, assert_harmless


@pytest.fixture
def store(tmp_path):
    """A store whose messages have hostile text wherever they can; the URL and the ids."""
    url = f"file:{tmp_path / 'store'}?embedded=1&durability=os"
    with penstock.connect(url) as queues:
        queues.create("dead")
        queues.create("orders", dead_letter="dead", max_receives=1)
        ids = [
            queues.push(
                "orders",
                HOSTILE.encode(),
                attributes={HOSTILE: HOSTILE, "bytes": b"\xff\x1b"},
            ).id
            for _ in range(3)
        ]
        # Short names are refused instead.
        with pytest.raises(penstock.errors.InvalidField):
            queues.push("orders", b"", group=HOSTILE)
        with pytest.raises(penstock.errors.InvalidField):
            queues.push("orders", b"", dedup_id=HOSTILE)
        claim = queues.pull("orders")
        assert claim is not None
        queues.release(claim)
        queues.pull("orders")
    return url, ids


def run(capsys, *words):
    """What a command writes."""
    cli.main([str(word) for word in words])
    written = capsys.readouterr()
    return written.out + written.err


LOOKING = {
    "list": ["list"],
    "stats": ["stats"],
    "peek": ["peek", "orders", "-n", "10"],
    "peek at claims": ["peek", "orders", "-n", "10", "--state", "in-flight"],
    "peek at dead letters": ["peek", "dead", "-n", "10"],
    "pull": ["pull", "orders", "-n", "10"],
    "history": ["history", "{id}"],
    "why": ["why", "{id}"],
    "configure": ["configure", "orders"],
    "redrive": ["redrive", "dead"],
}
# What a person may have copied from a message.
TYPED = {
    "queue": ["stats", HOSTILE],
    "id": ["history", HOSTILE],
    "receipt": ["delete", "orders", HOSTILE],
    "duration": ["pull", "orders", "--wait", HOSTILE],
    "command": [HOSTILE],
    "option": ["list", f"--{HOSTILE}"],
    "reader": ["readers", "{path}", "--forget", HOSTILE],
    "path": ["check", HOSTILE],
    "url": ["list", "--url", f"file:{HOSTILE}"],
    "url of another kind": ["list", "--url", f"{HOSTILE}://x"],
    "address": ["list", "--url", f"penstock://{HOSTILE}:1"],
    "config": ["serve", "--config", HOSTILE],
    "region": ["serve", "--data", "{path}2", "--region", HOSTILE, "--port", "99999"],
    "key": ["serve", "--data", "{path}2", "--key", f"{HOSTILE}:x"],
    "daemon": ["daemon", "status", HOSTILE],
    "mirror": ["mirror", "--from", f"file:{HOSTILE}", "--to", f"{HOSTILE}:x"],
    "cluster": ["cluster", "down", "--directory", HOSTILE],
    "app": ["worker", HOSTILE],
    "lake": ["pipeline", "status", "--lake", HOSTILE, "--journal", HOSTILE],
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", LOOKING)
def test_the_fields_of_messages_reach_the_terminal_escaped(store, capsys, command, as_json):
    url, ids = store
    words = [word.format(id=ids[0]) for word in LOOKING[command]]
    written = run(capsys, *words, "--url", url, *(["--json"] if as_json else []))
    assert written
    assert_harmless(written)
    if as_json:
        shown = [json.loads(line) for line in written.splitlines()]
        if command.startswith(("peek", "pull")):
            bodies = {(each["body"], each["attributes"][HOSTILE]) for each in shown}
            assert bodies == {(HOSTILE, HOSTILE)}


@pytest.mark.parametrize("given", TYPED)
def test_what_is_typed_is_shown_escaped_in_one_line(store, tmp_path, capsys, given):
    words = [word.replace("{path}", str(tmp_path / "store")) for word in TYPED[given]]
    if "--url" not in words and given not in ("command", "option"):
        os.environ.pop("PENSTOCK_URL", None)
    written = run(capsys, *words)
    assert_harmless(written)
    assert written.count("\n") <= 1


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_the_events_and_readers_of_a_store_are_shown_escaped(store, tmp_path, capsys, as_json):
    path = tmp_path / "store"
    reader = msgspec.json.encode(Reader(HOSTILE, 0, 0))
    (path / "readers").mkdir(mode=0o700)
    (path / "readers" / "x.json").write_bytes(reader)
    more = ["--json"] if as_json else []
    for command in ("inspect", "check", "readers"):
        written = run(capsys, command, path, *more)
        assert written
        assert_harmless(written)
        if as_json:
            assert [json.loads(line) for line in written.splitlines()]
    written = run(capsys, "stats", "--url", store[0], *more)
    assert_harmless(written)
    lines = len(run(capsys, "inspect", path).splitlines())
    assert lines == len(run(capsys, "inspect", path, "--json").splitlines())


def test_a_directory_whose_name_forges_lines_is_shown_escaped(store, tmp_path, capsys):
    """Row 29."""
    path = tmp_path / HOSTILE.replace("/", "")
    shutil.move(tmp_path / "store", path)
    url = f"file:{path}?embedded=1&durability=os"
    for words in (
        ["check", path],
        ["stats", "--url", url],
        ["daemon", "status", path],
        ["inspect", path, "--archive", path / "none"],
        ["mirror", "--from", f"file:{path}", "--status"],
        ["readers", path],
    ):
        assert_harmless(run(capsys, *words))
    (path / "store").write_text(HOSTILE)
    assert_harmless(run(capsys, "stats", "--url", url))
    assert_harmless(run(capsys, "check", path))


SHOP = """
    @app.task(retries=0)
    def work(text: str) -> str:
        raise ValueError(text)
"""


@pytest.fixture
def shop(tmp_path, quick_path):
    shop = Shop(tmp_path, f"file:{quick_path / 'store'}?durability=os")
    shop.write(SHOP)
    yield shop
    shop.close()
    penstock.backends.remote.daemon.stop_daemon(quick_path / "store")


def test_no_field_of_a_task_forges_a_line_of_the_worker_or_of_a_list(shop):
    """Row 29: the task's name and id, a name and a value of its arguments, its error."""
    raw = msgspec.Raw
    given = {
        "name": Envelope(HOSTILE, raw(b"{}"), id="1"),
        "id": Envelope("work", raw(encode({"text": "x"})), id=HOSTILE),
        "argument": Envelope("work", raw(encode({HOSTILE: 1})), id="3"),
        "value": Envelope("work", raw(encode({"text": HOSTILE})), id="4"),
        "type": Envelope("work", raw(encode({"text": [HOSTILE]})), id="5"),
        "error": Envelope("work", raw(b"{}"), id="6", failure=Failure(HOSTILE, HOSTILE)),
        "no task": b"\x1b[2J\nFORGED",
    }
    app = shop.app().app
    app.push(Push("tasks", encode(Envelope("work", raw(encode({"text": "first"}))))))
    for each in given.values():
        app.push(Push("tasks", each if isinstance(each, bytes) else encode(each)))
    app.close()
    worker = shop.start("--burst")
    worker.wait(60)
    printed = shop.printed()
    assert_harmless(printed)
    assert printed.count(" failed for the last time") == len(given) + 1
    for line in printed.splitlines():
        assert re.match(r"\d{4}-\d\d-\d\d |penstock worker: ", line), line
    _, out, err = shop.run("tasks", "failed", "shop:app")
    assert_harmless(out + err)
    assert len(out.splitlines()) == len(given) + 2
    _, out, err = shop.run("tasks", "failed", "shop:app", "--json")
    assert_harmless(out + err)
    assert HOSTILE in {json.loads(line)["task"] for line in out.splitlines()}
    for task_id in (HOSTILE, "1", "4", "6"):
        _, out, err = shop.run("tasks", "inspect", "shop:app", task_id)
        assert_harmless(out + err)
        assert out
    _, out, err = shop.run("tasks", "retry", "shop:app", HOSTILE)
    assert_harmless(out + err)
    until(lambda: worker.poll() is not None)
