"""Bad input to the commands of the pipeline is one sentence, and changes nothing."""

import io
import sys

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

from penstock import cli
from penstock.cli.lake.shell import _queries
from penstock.core.events import AnyEvent, Claimed, Deleted, Pushed, QueueCreated
from penstock.service import QueueSettings
from penstock.spark.bronze import events_table
from penstock.spark.lake import Lake
from tests.spark.journals import write_store

pytestmark = [
    pytest.mark.service("default-jre-headless"), pytest.mark.usefixtures("spark"),
    pytest.mark.timeout(300),
]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, with a store of ended messages and a file."""
    monkeypatch.chdir(tmp_path)
    lives: list[list[AnyEvent]] = [
        [Pushed(n, 1, n, b"x"), Claimed(n, 1, n, 1, n + 9), Deleted(n, 1, n, 1)]
        for n in range(1, 9)
    ]
    write_store(tmp_path / "store", [[QueueCreated(1, 1, "q", QueueSettings())], *lives])
    write_store(tmp_path / "empty", [])
    (tmp_path / "file").write_text("mine")
    return tmp_path


def only_sentence(capsys):
    """The only line that was printed."""
    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "0"], "argument --batch: '0' is outside 1KiB to 1024GiB"),
        (["--batch=-1"], "argument --batch: '-1' is outside"),
        (["--watch", "--every=-1"], "argument --every: '-1' is outside 100ms to 30d"),
        (["--watch", "--every", "0"], "argument --every: '0' is outside"),
        # As a time to wait it would be too large for Python.
        (["--watch", "--every", "999999999d"], "argument --every: '999999999d' is outside"),
        (["--watch", "--metrics-port=-1"], "argument --metrics-port: '-1' is outside 1 to 65535"),
        (["--conf", "spark.driver.memory"], "argument --conf: 'spark.driver.memory' is not of"),
        (["--master", "nonsense"], "argument --master: 'nonsense' is not a Spark master; use"),
        (["--lake", ""], "argument --lake: names no directory"),
        (["--journal", ""], "argument --journal: names no directory"),
    ],
)
def test_an_argument_of_a_run_that_makes_no_sense_is_refused(place, capsys, words, said):
    before = sorted(place.iterdir())
    assert cli.main(["pipeline", "run", "--journal", "store", "--lake", "lake", *words]) == 2
    assert only_sentence(capsys).startswith(f"penstock: {said}")
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("action", [["run", "--journal", "store"], ["audit"], ["compact"]])
def test_a_file_is_not_a_lake(place, capsys, action):
    assert cli.main(["pipeline", *action, "--lake", "file"]) == 6
    kind = "is not a directory" if action[0] == "run" else "is not a Penstock lake; "
    assert only_sentence(capsys).startswith(f"penstock: file: {kind}")
    assert (place / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["a%20b", "a\\b"])
def test_a_directory_whose_name_delta_misreads_is_refused(place, capsys, name):
    before = sorted(place.iterdir())
    assert cli.main(["pipeline", "run", "--journal", "store", "--lake", name]) == 6
    assert only_sentence(capsys).startswith(f"penstock: {name}: cannot be a lake: ")
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ["compact", "--keep=-5d"],
        ["compact", "--keep-versions=-3h"],
        ["compact", "--keep-versions", "9" * 20],
        ["audit", "--limit=-1"],
    ],
)
def test_nothing_is_dropped_or_judged_by_a_number_outside_its_range(place, capsys, words):
    assert cli.main(["pipeline", "run", "--journal", "store", "--lake", "lake"]) == 0
    events = events_table(Lake.open("lake"))
    before = events.rows(), events.commits()
    capsys.readouterr()
    assert cli.main(["pipeline", *words, "--lake", "lake"]) == 2
    assert "is outside 0" in only_sentence(capsys)
    assert (events.rows(), events.commits()) == before


def test_a_lake_of_an_empty_store_has_nothing_to_drop_and_is_not_behind(place, capsys):
    there = ["--lake", "lake"]
    assert cli.main(["pipeline", "run", *there, "--journal", "empty"]) == 0
    assert cli.main(["pipeline", "compact", *there, "--keep", "0"]) == 0
    assert "0 events of 0 messages dropped" in capsys.readouterr().out
    assert cli.main(["pipeline", "status", *there, "--journal", "empty"]) == 0
    *_, table = capsys.readouterr().out.partition("state\n")
    assert {line.split()[-1] for line in table.splitlines()} == {"-"}


@pytest.mark.parametrize(
    ("words", "lock"),
    [
        (["run", "--journal", "store"], ".events.lock"),
        (["audit"], ".verdicts.lock"),
        (["compact"], ".tables.lock"),
        (["forget", "00000000-0000-8000-9000-000000000001"], ".events.lock"),
    ],
)
def test_a_lake_that_cannot_be_written_is_named_with_the_reason(place, capsys, words, lock):
    """Its lock is a directory, which no user can open, unlike what only others may not open."""
    lake = Lake.open("lake", create=True)
    (lake.path / lock).mkdir()
    assert cli.main(["pipeline", *words, "--lake", "lake"]) == 6
    assert f"cannot be locked: {lock} is a directory, not a regular file" in only_sentence(capsys)


class TerminalText(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "words", [["run", "--journal", "store"], ["audit"], ["compact", "--keep=0"]]
)
def test_at_a_terminal_the_sentence_about_an_error_replaces_the_bar(place, monkeypatch, words):
    lake = Lake.open("lake", create=True)
    (lake.path / ".verdicts.lock").mkdir()
    (lake.path / ".tables.lock").mkdir()
    shown = TerminalText()
    monkeypatch.setattr(sys, "stderr", shown)
    assert cli.main(["pipeline", *words, "--lake", "lake"]) == 6
    assert shown.getvalue().rpartition("\x1b[K")[2].startswith("penstock: ")


def test_an_engine_without_queues_is_no_engine_to_count_with(place, capsys):
    words = ["pipeline", "audit", "--journal", "store", "--url", "memory:"]
    assert cli.main(words) == 2
    assert "--url: there is no queue" in only_sentence(capsys)


def test_a_page_that_cannot_be_written_is_refused_before_any_work(place, capsys, monkeypatch):
    Lake.open("lake", create=True)
    monkeypatch.setattr("penstock.cli.lake.report.spark_opener", lambda _: pytest.fail("it began"))
    assert cli.main(["pipeline", "report", "--lake", "lake", "--output", "/proc/page.html"]) == 2
    said = "--output: '/proc/page.html' cannot be written: No such file or directory"
    assert said in only_sentence(capsys)


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        ("-- it's\nselect 1;\nselect 2", ["-- it's\nselect 1", "select 2"]),
        (
            "select 1 /* ; ' */; select ';', \"';\", `;`;",
            ["select 1 /* ; ' */", "select ';', \"';\", `;`"],
        ),
        ("select 'it\\'s;';-- the end", ["select 'it\\'s;'"]),
        (";;\n/* nothing\n; here */\n-- nor; here\n", []),
        ("select 'open; \n", ["select 'open;"]),
    ],
)
def test_a_semicolon_in_a_text_or_a_comment_ends_no_query(text, queries):
    assert list(_queries(io.StringIO(text), shows_prompt=False)) == queries
