"""One way to name a store, and no option without effect: a table of every command and action."""

import json
import re
import shutil
from typing import NamedTuple

import pytest

import penstock
from penstock import cli
from penstock.cli import cluster, parser, pipeline, tasks

URL = "--url"
# How a store can be named.
WAYS = {
    "--url file:PATH": lambda path: ([URL, f"file:{path}"], None),
    "--url PATH": lambda path: ([URL, path], None),
    "PENSTOCK_URL=file:PATH": lambda path: ([], f"file:{path}"),
    "PENSTOCK_URL=PATH": lambda path: ([], path),
}


class CommandLine(NamedTuple):
    """The words behind a command, and how it takes the two shared options."""

    words: list[str]
    url: str = "store"  # store, path (it has PATH, too), or refused
    json: str = "lines"  # lines or refused


TABLE = {
    "create": CommandLine(["other"]),
    "configure": CommandLine(["orders"]),
    "pause": CommandLine(["orders"]),
    "resume": CommandLine(["orders"]),
    "remove": CommandLine(["orders"]),
    "list": CommandLine([]),
    "push": CommandLine(["orders", "x"]),
    "pull": CommandLine(["orders"]),
    "extend": CommandLine(["orders", "{receipt}", "1m"]),
    "release": CommandLine(["orders", "{receipt}"]),
    "delete": CommandLine(["orders", "{receipt}"]),
    "peek": CommandLine(["orders"]),
    "export": CommandLine([]),
    "stats": CommandLine([]),
    "top": CommandLine([], "live", "refused"),
    "tail": CommandLine(["orders"], "live", "live"),
    "purge": CommandLine(["orders"]),
    "redrive": CommandLine(["orders", "--to", "second"]),
    "history": CommandLine(["{id}"]),
    "why": CommandLine(["{id}"]),
    "inspect": CommandLine([], "path"),
    "check": CommandLine([], "path"),
    "readers": CommandLine([], "path"),
    "capture": CommandLine(["--queue", "orders", "--output", "{path}/out.slice"], "path"),
    "lambda": CommandLine(["http://127.0.0.1:1", "--queue", "second", "--burst"]),
    "backup": CommandLine(["{path}-backup"], "backup", "backup"),
    "restore": CommandLine(["{path}-backup"], "backup", "backup"),
    "daemon status": CommandLine([], "path"),
    "daemon stop": CommandLine([], "path"),
    "daemon run": CommandLine(["--durability", "x"], "path", "refused"),
    "serve": CommandLine(["--port", "99999"], "serve", "serve"),
    "mirror": CommandLine(["--from", "{path}", "--status"], "refused"),
    "worker": CommandLine(["shop:app", "--burst"], "worker", "refused"),
    "shell": CommandLine([], "shell", "shell"),
    "completion": CommandLine(["bash"], "refused"),
    "demo": CommandLine([], "refused", "demo"),
    "tasks list": CommandLine(["shop:app"], "tasks"),
    "tasks failed": CommandLine(["shop:app"], "tasks"),
    "tasks retry": CommandLine(["shop:app", "--all"], "tasks"),
    "tasks cancel": CommandLine(["shop:app", "1"], "tasks"),
    "tasks inspect": CommandLine(["shop:app", "1"], "tasks"),
    "cluster up": CommandLine([], "refused", "cluster"),
    "cluster down": CommandLine([], "refused", "cluster"),
    "cluster url": CommandLine([], "refused", "cluster"),
    **{
        f"cluster {action}": CommandLine(words, "cluster", "cluster")
        for action, words in {
            "status": [],
            "move": ["0", "n"],
            "drain": ["n"],
            "spread": ["q"],
            "move-queue": ["q", "--to", "0"],
            "reshard": ["8"],
        }.items()
    },
    **{
        f"pipeline {action}": CommandLine(words, "refused", "spark")
        for action, words in {
            "run": ["--journal", "x", "--lake", "x"],
            "status": ["--journal", "x", "--lake", "x"],
            "report": ["--lake", "x", "--output", "x"],
            "sql": ["--lake", "x", "select 1"],
            "shell": ["--lake", "x"],
            "warm": ["--lake", "x"],
            "forget": ["--lake", "x", "1"],
            "compact": ["--lake", "x"],
        }.items()
    },
    "pipeline audit": CommandLine(["--lake", "x"], "spark", "spark"),
    "pipeline replay": CommandLine(["--lake", "x", "--to", "q"], "spark", "spark"),
}


def test_the_table_has_every_command_and_action():
    with_actions = {
        "daemon": ["status", "stop", "run"],
        "cluster": cluster._ACTIONS,
        "tasks": tasks._ACTIONS,
        "pipeline": pipeline.ACTIONS,
    }
    wanted = {name for name in parser.COMMANDS if name not in with_actions}
    wanted |= {f"{name} {action}" for name, given in with_actions.items() for action in given}
    assert wanted == set(TABLE)


def of_kind(option, *kinds):
    """The commands that take an option in one of these ways."""
    return [name for name, line in TABLE.items() if getattr(line, option) in kinds]


@pytest.fixture
def named(tmp_path, monkeypatch, capsys):
    """Runs a command on a fresh copy of one store, named in some way; its status and output."""
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    original = tmp_path / "original"
    with penstock.connect(f"file:{original}?embedded=1&durability=os") as queues:
        queues.create("orders")
        queues.create("second")
        message_id = queues.push("orders", b"hello").id
        claim = queues.pull("orders", visibility_timeout=600)
        assert claim is not None
        queues.push("orders", b"again")
    path = tmp_path / "store"

    def run(command, *shared, variable=None, more=()):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, path)
        given = {"receipt": claim.receipt, "id": message_id, "path": path}
        words = [word.format(**given) for word in (*TABLE[command].words, *more)]
        with monkeypatch.context() as patched:
            if variable is not None:
                patched.setenv("PENSTOCK_URL", variable)
            status = cli.main([*command.split(), *words, *map(str, shared)])
        written = capsys.readouterr()
        return status, written.out, written.err

    return run


def without_times(text):
    text = re.sub(r"\b(0x)?[0-9a-f]{6,}[0-9a-f-]*\b|\d\d:\d\d:\d\d[.\d]*", "…", text)
    return re.sub(r"[\d.]+(s|ms)\b|\d+m \d+s|AA[\w-]+", "…", text)


@pytest.mark.parametrize("command", of_kind("url", "store"))
def test_a_store_is_named_in_four_ways(named, tmp_path, command):
    found = []
    for way in WAYS.values():
        shared, variable = way(f"{tmp_path / 'store'}?embedded=1&durability=os")
        found.append(named(command, *shared, variable=variable))
    assert [each[0] for each in found] == [0] * 4, found
    assert len({without_times(out) for _, out, _ in found}) == 1
    assert {err for _, _, err in found} == {""}


@pytest.mark.parametrize("command", of_kind("url", "path"))
def test_a_command_of_files_takes_the_same_names_and_a_path(named, tmp_path, command):
    path = str(tmp_path / "store")
    found = [
        named(command, *shared, variable=v) for shared, v in (way(path) for way in WAYS.values())
    ]
    found += [named(command, more=[name]) for name in (path, f"file:{path}")]
    assert len({without_times(out + err) for _, out, err in found}) == 1, found
    assert len({status for status, _, _ in found}) == 1
    status, out, err = named(command, URL, path, more=[path])
    assert (status, out) == (2, "")
    assert "there is a PATH, too; give one of them" in err
    status, out, err = named(command, URL, "redis://127.0.0.1:1")
    assert (status, out) == (2, "")
    assert "redis://127.0.0.1:1 has no files here" in err


@pytest.mark.parametrize("way", WAYS)
def test_the_store_of_a_backup_and_the_place_to_restore_are_named_in_four_ways(
    named, tmp_path, way
):
    for command, path in (("backup", tmp_path / "store"), ("restore", tmp_path / "restored")):
        shared, variable = WAYS[way](str(path))
        status, out, err = named(command, "--json", *shared, variable=variable)
        assert (status, err) == (0, "")
        assert json.loads(out)["sound"] is True
    assert (tmp_path / "restored" / "store").is_file()
    for command in ("backup", "restore"):
        status, out, err = named(command, URL, "redis://127.0.0.1:1")
        assert (status, out) == (2, "")
        assert "redis://127.0.0.1:1 has no files here" in err


@pytest.mark.parametrize("command", of_kind("url", "refused"))
def test_a_command_that_has_no_use_for_a_url_refuses_it(named, command):
    status, out, err = named(command, URL, "memory:")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("penstock: --url: ")


@pytest.mark.parametrize("command", of_kind("json", "lines"))
def test_results_are_lines_of_json_on_demand(named, tmp_path, command):
    shared = []
    if TABLE[command].url in ("store", "path"):
        shared = [URL, f"file:{tmp_path / 'store'}?embedded=1&durability=os"]
    if TABLE[command].url == "tasks":
        pytest.skip("tests/tasks/test_tasks_command.py")
    _, out, err = named(command, "--json", *shared)
    assert err in (
        "",
        f"penstock: {tmp_path / 'store'}: no mirror with the name 'mirror' was started\n",
    )
    for line in out.splitlines():
        assert isinstance(json.loads(line), dict)


@pytest.mark.parametrize("command", of_kind("json", "refused"))
def test_a_command_that_prints_no_results_refuses_json(named, tmp_path, command):
    more = [str(tmp_path / "store")] if TABLE[command].url == "path" else []
    status, out, err = named(command, "--json", more=more)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("penstock: --json: ")


@pytest.mark.parametrize("command", [*of_kind("url", "store", "path"), "serve"])
@pytest.mark.parametrize("address", ["http://127.0.0.1:9324", "127.0.0.1:9324"])
def test_the_address_of_an_endpoint_is_answered_with_the_url_to_use(named, command, address):
    more = ["--port", "0"] if command == "serve" else []
    status, out, err = named(command, URL, address, more=more)
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert "sqs://us-east-1?endpoint=http://127.0.0.1:9324" in err


def test_a_server_takes_a_plain_path_as_its_store(named, tmp_path):
    """Port 99999 is refused after the store was read."""
    for way in WAYS.values():
        shared, variable = way(str(tmp_path / "store"))
        status, _, err = named("serve", *shared, variable=variable)
        assert status == 3
        assert "port: 99999" in err
