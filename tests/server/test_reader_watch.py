"""A reader that nobody uses any more is named: in lines, and by `penstock readers`."""

import json
import os
import time

import pytest

from penstock.backends.engine.store import open_engine
from penstock.cli import main
from penstock.journal import MemoryJournal, reader_positions
from penstock.journal.reader_positions import ABANDONED_BYTES, ABANDONED_MS, Reader
from penstock.server.lines import ServerLines
from penstock.server.reader_watch import ReaderWatch
from penstock.service import DAY_MS, CreateQueue, Push
from tests.server.test_lines import fields_of, served

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("behind_bytes", "still_ms", "is_abandoned"),
    [
        (ABANDONED_BYTES, ABANDONED_MS, True),
        (ABANDONED_BYTES - 1, ABANDONED_MS, False),
        (ABANDONED_BYTES, ABANDONED_MS - 1, False),
        (0, 365 * DAY_MS, False),
        (-5, 365 * DAY_MS, False),
        (2**40, -1_000, False),
    ],
)
def test_a_reader_is_abandoned_if_it_is_still_and_much_is_kept_for_it(
    behind_bytes, still_ms, is_abandoned
):
    reader = Reader("mirror", 1_000, NOW_MS - still_ms)
    assert reader.is_abandoned(1_000 + behind_bytes, NOW_MS) is is_abandoned
    assert reader.behind_bytes(1_000 + behind_bytes) == max(0, behind_bytes)


def test_an_abandoned_reader_has_a_line_a_day_until_it_moves_or_goes(tmp_path, capsys):
    watch = ReaderWatch(tmp_path, lambda: 10**9, ServerLines())

    def lines(now_ms):
        watch.look(now_ms)
        return capsys.readouterr().err.splitlines()

    assert lines(NOW_MS) == []
    reader_positions.register(tmp_path, "mirror", 1_000, NOW_MS - ABANDONED_MS)
    (line,) = lines(NOW_MS)
    assert fields_of(line) == {
        "reader": "mirror",
        "kept_bytes": str(10**9 - 1_000),
        "not_moved_s": str(ABANDONED_MS // 1_000),
        "remedy": f"penstock readers {tmp_path} --forget mirror",
    }
    assert lines(NOW_MS + DAY_MS - 1) == []
    assert len(lines(NOW_MS + DAY_MS)) == 1
    reader_positions.register(tmp_path, "mirror", 2_000, NOW_MS + DAY_MS)
    assert lines(NOW_MS + DAY_MS) == []
    # It stops again, and that is told again.
    assert len(lines(NOW_MS + DAY_MS + ABANDONED_MS)) == 1
    reader_positions.forget(tmp_path, "mirror")
    assert lines(NOW_MS + 9 * DAY_MS) == []
    assert ReaderWatch.of(MemoryJournal(), "", ServerLines()) is None


def make_store_with_abandoned_reader(path):
    engine = open_engine(path, background=False)
    engine.submit(CreateQueue("q"))
    for _ in range(18):
        engine.submit(Push("q", os.urandom(1024 * 1024 - 100)))
    engine.close()
    now_ms = time.time_ns() // 1_000_000
    reader_positions.register(path, "old-mirror", 0, now_ms - 3 * DAY_MS)
    reader_positions.register(path, "pipeline", 0, now_ms - 1_000)


def test_a_start_and_the_command_name_an_abandoned_reader_and_no_other(tmp_path, capsys):
    store = tmp_path / "store"
    make_store_with_abandoned_reader(store)
    assert main(["readers", str(store)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("abandoned?") == 1
    assert "old-mirror: 18.0 MiB of the journal are kept for it; if it is not" in shown
    assert f"penstock readers {store} --forget old-mirror" in shown
    assert main(["readers", str(store), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["name"], each["abandoned"]) for each in found] == [
        ("old-mirror", True),
        ("pipeline", False),
    ]
    with served("--data", str(store)) as (server, _):
        fields = fields_of(server.line("reader-abandoned"))
        text = server.stop()
    assert fields["reader"] == "old-mirror"
    assert int(fields["kept_bytes"]) > 17 * 2**20
    assert text.count("reader-abandoned") == 1
    assert main(["readers", str(store), "--forget", "old-mirror"]) == 0
    capsys.readouterr()
    assert main(["readers", str(store)]) == 0
    assert "abandoned" not in capsys.readouterr().out
