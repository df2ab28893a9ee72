"""Every command and piece of Python in the README and the docs is run, in order, as written.

Blocks of the languages `sh`, `console` and `python` are run; `py` is Python that needs a server,
and is run after the commands above it. What needs other machines or accounts is `text` or `shell`:
of these blocks, and of commands within sentences, the arguments are checked.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from penstock.cli.parser import make_parser
from penstock.cli.session import UsageError
from tests.conftest import IN_CI, NOT_INSTALLED

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Its Python is run by `tests/spark/test_queue_document.py`, in the Spark session of those tests.
IN_SPARK = ROOT / "docs" / "how-to" / "spark-queues.md"
# The Python of these needs a server that its commands start; it finds it by these variables.
WITH_SERVER: dict[Path, dict[str, str]] = {
    ROOT / "README.md": {},
    ROOT / "docs" / "how-to" / "carrot.md": {},
    ROOT / "docs" / "how-to" / "sqs.md": {},
    ROOT / "docs" / "how-to" / "sqs-adapter.md": {
        "AWS_ENDPOINT_URL_SQS": "http://127.0.0.1:9471",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
    },
}
# Its Python is run by `tests/backends/rabbitmq/test_service.py`, with the broker of those tests.
WITH_BROKER = ROOT / "docs" / "how-to" / "rabbitmq.md"
# Commands that a document may give its reader, but that a test must not run.
SETUP = ("pip ", "uv ", "git ", "sudo ", "pre-commit ")

PAGE_BYTES_MAX = 15 * 1024

# Some commands start Spark, which takes long on a busy machine.
COMMAND_S_MAX = 240
pytestmark = pytest.mark.timeout(480)


def blocks(document: Path, *languages: str) -> list[str]:
    return [text for name, text in FENCE.findall(document.read_text()) if name in languages]


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a block, with the lines that are typed at the prompt that it opens."""
    lines = block.replace("\\\n", " ").splitlines()
    has_prompts = any(line.startswith("$ ") for line in lines)
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if has_prompts:
            if not line.startswith("$ "):
                continue
            line = line[2:]
        typed = []
        while has_prompts and at < len(lines) and not lines[at].startswith("$ "):
            if lines[at].startswith("penstock> "):
                typed.append(lines[at].removeprefix("penstock> "))
            at += 1
        if line.strip() and not line.startswith("#"):
            yield line, "\n".join(typed) + "\n" if typed else ""


def file_name(block: str) -> str | None:
    """The file name that a comment in the first line of a block of Python gives, if any."""
    found = re.match(r"# (\w+\.py)\n", block)
    return None if found is None else found[1]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Terminal:
    """One working directory and environment, in which a document's commands follow each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(directory),
            # As in an environment into which Penstock was installed from its wheel.
            "PYTEST_PLUGINS": "pytest_penstock",
            # What Java and Spark load is the same for every document.
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
        }
        # A document sets the variables that its commands need.
        for name in [each for each in self.environment if each.startswith(("AWS_", "PENSTOCK_"))]:
            del self.environment[name]

    def run(self, command: str, typed: str) -> None:
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            assert words[1] in targets(), f"there is no target for {command!r}"
        elif words[0] == "export":
            self.environment |= dict(word.split("=", 1) for word in words[1:])
        elif words[:2] == ["penstock", "serve"] or words[:3] == ["penstock", "daemon", "run"]:
            self.serve(command)
        elif words[0] == "redis-server":
            if shutil.which("redis-server") is None and not IN_CI:
                pytest.skip(NOT_INSTALLED + "redis-server")
            self.serve(f"{command} --logfile redis.txt")
        elif not command.startswith(SETUP):
            self.finish(command, typed)

    def finish(self, command: str, typed: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.directory,
            env=self.environment,
            input=typed.encode(),
            capture_output=True,
            timeout=COMMAND_S_MAX,
        )
        printed = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, f"{command!r} ended with {done.returncode}: {printed}"

    def serve(self, command: str) -> None:
        # `exec`, so that stopping the shell stops the server.
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.directory, env=self.environment
        )
        self.servers.append(server)
        named_port = re.search(r"--port[= ](\d+)|--listen \S+:(\d+)", command)
        port = int(named_port[1] or named_port[2]) if named_port else 9324
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            assert server.poll() is None, f"{command!r} ended with {server.returncode}"
            assert time.monotonic() < deadline, f"{command!r} does not answer on {port}"

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
            server.wait(timeout=60)
        for store in self.directory.rglob("store"):
            subprocess.run(
                [sys.executable, "-m", "penstock", "daemon", "stop", str(store.parent)],
                capture_output=True,
                check=False,
            )


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if blocks(d, "sh", "console")], ids=named
)
def test_the_commands_of_a_document_work_in_order(document: Path, terminal: Terminal) -> None:
    ran = 0
    for block in blocks(document, "python"):
        if (name := file_name(block)) is not None:
            (terminal.directory / name).write_text(block)
    terminal.environment |= WITH_SERVER.get(document, {})
    for language, block in FENCE.findall(document.read_text()):
        if language in ("sh", "console"):
            for command, typed in commands(block):
                terminal.run(command, typed)
                ran += 1
        elif language == "py":
            assert document in WITH_SERVER
            (terminal.directory / "with_server.py").write_text(block)
            terminal.finish("python with_server.py", "")
    assert ran > 0


def shown_commands(document: Path) -> Iterator[list[str]]:
    """The words behind `penstock` in each command of a block that is not run."""
    for block in blocks(document, "", "text", "shell"):
        for line in block.replace("\\\n", " ").splitlines():
            # In a crontab, the command comes after the time.
            if found := re.search(r"^(?:\$ |[-*/0-9 ]+ )?penstock (.*)", line):
                words = shlex.shlex(found[1], posix=True, punctuation_chars=True)
                words.whitespace_split = True
                yield list(takewhile(lambda word: word[0] not in "();<>|&", words))


def inline_commands(document: Path) -> Iterator[list[str]]:
    """The words behind `penstock` in each command within a sentence, up to the first omission."""
    for text in re.findall(r"`penstock ([-a-z][^`]*)`", FENCE.sub("", document.read_text())):
        yield list(takewhile(lambda word: not re.search(r"[…\[|]", word), shlex.split(text)))


def fault_of(words: list[str]) -> str:
    """What is wrong with a command line; empty if nothing is."""
    try:
        make_parser().parse_args(words)
    except SystemExit as end:
        return str(end.code or "")
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_commands_that_are_not_run_have_valid_arguments(document: Path) -> None:
    assert [fault for words in shown_commands(document) if (fault := fault_of(words))] == []
    faults = [fault_of(words) for words in inline_commands(document)]
    # A sentence may leave arguments out, and name a number by a letter.
    left_out = re.compile(r"required|missing|expected one argument|invalid int value: '[A-Z]'")
    assert [fault for fault in faults if fault and not left_out.search(fault)] == []


def test_python_that_needs_a_server_is_in_a_document_whose_server_a_test_starts() -> None:
    found = {document for document in DOCUMENTS if blocks(document, "py")}
    assert found == {*WITH_SERVER, WITH_BROKER}


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d != IN_SPARK and blocks(d, "python")], ids=named
)
def test_the_python_of_a_document_runs_unchanged(document: Path, terminal: Terminal) -> None:
    for number, block in enumerate(blocks(document, "python")):
        script = terminal.directory / (file_name(block) or f"block_{number}.py")
        script.write_text(block)
        terminal.finish(f"python {script}", "")


def test_every_page_that_a_document_links_to_exists() -> None:
    missing = [
        f"{named(document)}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert missing == []


def test_a_page_can_be_read_in_one_sitting() -> None:
    pages = [page for page in DOCUMENTS if page.name != "CONTRIBUTING.md"]
    large = {named(page): page.stat().st_size for page in pages}
    assert {name: size for name, size in large.items() if size > PAGE_BYTES_MAX} == {}
