"""`penstock top` in a real terminal, over HTTP and over a store, with content of every kind."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import penstock
from tests.cli.conftest import EXECUTABLE
from tests.cli.live.terminal import TmuxTerminal

pytestmark = pytest.mark.service("tmux")
LONG = "queue-with-a-name-that-is-as-long-as-a-name-can-be-and-so-does-not-fit-anywhere1"


class ServedStore:
    """A `penstock serve` of its own process, and a client of its store."""

    def __init__(self, path, *options, port=0):
        self._path = path
        self._options = options
        self.start(port)

    def start(self, port):
        words = ["serve", "--data", self._path, "--port", str(port), "--json", *self._options]
        self._process = subprocess.Popen([EXECUTABLE, *words], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.url = json.loads(self._process.stdout.readline())["url"]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def served(tmp_path):
    server = ServedStore(tmp_path / "store")
    yield server
    server.kill()


@pytest.fixture
def queues(served, tmp_path):
    with penstock.connect(f"file:{tmp_path / 'store'}") as found:
        yield found


@pytest.fixture
def open_top():
    """Starts `penstock top` in a terminal."""
    opened: list[TmuxTerminal] = []
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="p") as path:

        def begin(url, *options, columns=80, lines=24, **environment):
            given = [f"{name}={value}" for name, value in environment.items()]
            # The test runner may have said how wide its own output is.
            words = [
                "env",
                "-u",
                "COLUMNS",
                "-u",
                "LINES",
                "TERM=screen-256color",
                "LANG=C.UTF-8",
                *given,
            ]
            words += [str(EXECUTABLE), "top", "--url", url, *options]
            directory = Path(path, str(len(opened)))
            directory.mkdir()
            opened.append(TmuxTerminal(directory, words, columns, lines))
            return opened[-1]

        yield begin
        for each in opened:
            each.__exit__()


def fill(queues):
    queues.create("orders", dead_letter="orders-dead", max_receives=1)
    queues.create(LONG, max_messages=2)
    queues.push_many(LONG, [b"1", b"2"])
    queues.push("orders", '{"order": 1, "by": "Zoë [bold]x[/bold]"}', group="eu",
                attributes={"ki\x1b[31mnd": "[red]x[/red]"})  # fmt: skip
    queues.push("orders", "\x1b[31mred \u202eright to left שלום 🦆🦆")
    queues.push("orders", b"\xff\x00")


def test_the_first_screen_answers_whether_anything_is_stuck(served, queues, open_top):
    fill(queues)
    top = open_top(served.url)
    screen = top.wait_for(r"1 queue is stuck\.")
    lines = screen.splitlines()
    assert "3 queues · 5 messages" in screen
    # What is stuck is first, and its name is cut where the figures begin.
    first = next(line for line in lines if line.lstrip().startswith("!"))
    assert "queue-with-a-name" in first
    assert "…" in first
    assert len(first) <= 80
    assert any(line.split()[:3] == ["orders", "3", "0"] for line in lines)
    top.type("q")
    assert "ended with 0" in top.wait_for("ended with")


@pytest.mark.parametrize("over", ["http", "store"])
def test_keys_lead_into_a_queue_and_a_message_and_back(served, queues, open_top, tmp_path, over):
    fill(queues)
    url = served.url if over == "http" else f"file:{tmp_path / 'store'}"
    top = open_top(url, columns=120, lines=40)
    top.wait_for("is stuck")
    top.type("j", "Enter")
    screen = top.wait_for("3 messages visible")
    assert '{"order": 1, "by": "Zoë [bold]x[/bold]"}' in screen
    assert r"\x1b[31mred \u202eright to left" in screen
    assert "🦆🦆" in screen
    assert "2 bytes, not text" in screen
    assert "after 1 delivery to orders-dead" in screen
    top.type("Enter")
    # The body is read after the life.
    screen = top.wait_for(r'  "by": "Zoë \[bold\]x\[/bold\]"')
    assert "Never delivered" in screen
    assert r"ki\x1b[31mnd" in screen
    assert "[red]x[/red]" in screen
    top.type("Escape")
    top.wait_for("3 messages visible")
    top.type("i")
    top.wait_for("0 messages in flight")
    top.type("Escape")
    top.wait_for("is stuck")


def test_what_happens_is_shown_as_it_happens(served, queues, open_top):
    queues.create("orders")
    top = open_top(served.url)
    top.wait_for(r"orders +0 +0 +–")
    queues.push_many("orders", [b"x"] * 9_900)
    queues.push_many("orders", [b"x"] * 2_100)
    top.wait_for(r"orders +12k +0 ")
    queues.pull_many("orders", 7)
    top.wait_for(r"orders +12k +7 ")
    queues.create("mail")
    top.wait_for("mail +0")
    queues.remove("orders")
    top.wait_for(r"1 queue · 0 messages")


def test_a_thousand_queues_are_searched_and_sorted(served, queues, open_top):
    for number in range(1_000):
        queues.create(f"q{number:03}")
    queues.push_many("q777", [b"x"] * 5)
    top = open_top(served.url)
    top.wait_for("1,000 queues · 5 messages")
    top.type("s", "s")
    top.wait_for(r"by depth(?s:.)*^ +q777 +5")
    top.type("End")
    top.wait_for(r"^ +q999 ")
    top.type("/")
    top.wait_for("a part of a queue")
    top.type("q77")
    screen = top.wait_for("q770")
    assert "q001" not in screen
    top.type("Escape")
    top.wait_for(r"^ +q7[68]\d ")


def test_a_server_that_went_away_is_named_and_its_return_noticed(served, queues, open_top):
    queues.create("orders")
    top = open_top(served.url)
    top.wait_for("Nothing is stuck")
    queues.close()
    served.kill()
    top.wait_for("No answer")
    served.start(served.port)
    top.wait_for("Nothing is stuck")


def test_a_terminal_that_gets_wider_shows_the_last_hour(served, queues, open_top):
    queues.create("orders")
    top = open_top(served.url, "--theme", "light")
    assert "last hour" not in top.wait_for("orders")
    top.resize(140, 30)
    top.wait_for("Depth, last hour")


def test_a_server_with_keys_is_read_with_one_of_them(tmp_path, open_top):
    server = ServedStore(tmp_path / "locked", "--key", "AKIAOWNER:opensesame-opensesame")
    try:
        shut = open_top(server.url)
        assert "checks keys" in shut.wait_for("ended with 3")
        keys = {"AWS_ACCESS_KEY_ID": "AKIAOWNER", "AWS_SECRET_ACCESS_KEY": "opensesame-opensesame"}
        open_top(server.url, **keys).wait_for("No queues yet")
        keys["AWS_SECRET_ACCESS_KEY"] = "wrong"
        assert "is wrong" in open_top(server.url, **keys).wait_for("ended with 3")
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (["--url", "http://127.0.0.1:1"], 4, "cannot be reached"),
        (["--url", "http://me:secret@127.0.0.1:1"], 3, "a server's URL is http://HOST:PORT"),
        (["--url", "memory:"], 2, "is opened for one process alone"),
        (["--url", "file:/nowhere/at/all"], 3, "no store at"),
        ([], 2, "no store was given"),
    ],
)
def test_what_cannot_be_watched_is_said_in_a_sentence(tmp_path, words, status, why):
    done = subprocess.run(
        ["script", "-qec", f"{EXECUTABLE} top {' '.join(words)}", "/dev/null"],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env={key: value for key, value in os.environ.items() if key != "PENSTOCK_URL"},
    )  # fmt: skip
    assert done.returncode == status
    assert why in done.stdout
    assert "Traceback" not in done.stdout
    assert "secret" not in done.stdout


def test_without_a_terminal_stats_is_named_instead(process, tmp_path):
    done = process("top", "--url", f"file:{tmp_path}")
    assert done.status == 2
    assert done.err == "penstock: top needs a terminal; penstock stats prints the queues once\n"


def test_without_its_package_the_extra_is_named(queues, tmp_path):
    code = (
        "import sys; sys.modules['textual'] = None; from penstock.cli import main; "
        f"sys.exit(main(['top', '--url', 'file:{tmp_path / 'store'}']))"
    )
    done = subprocess.run(
        ["script", "-qec", shlex.join([sys.executable, "-c", code]), "/dev/null"],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "install it with pip install 'PATH-OF-THE-CLONE[top]'" in done.stdout
    assert done.returncode == 3
