"""Row 28: another user of the machine has prepared every path that a command opens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.backends.remote.daemon import daemon_directory, running_pid, stop_daemon
from tests.test_files import NOBODY, tree

TIMEOUT_S = 60
THEIRS = f"belongs to user {NOBODY}, and this process runs as user {os.geteuid()}"
SECRET = "0123456789abcdef0123456789abcdef"


def refusal(*words, **variables):
    """What a command says that refuses, in one line on stderr and nothing on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **variables},
    )
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stdout + done.stderr
    assert done.returncode not in (0, -9)
    return done.stderr


def give_away(*paths):
    """Makes these paths, and what is in them, those of another user."""
    for path in paths:
        for each in [path, *path.rglob("*")]:
            os.lchown(each, NOBODY, NOBODY)


@pytest.fixture
def store(tmp_path):
    """A store of this user that nobody holds."""
    path = tmp_path / "store"
    with penstock.connect(f"file:{path}?embedded=1&durability=os") as queues:
        queues.create("orders")
    return path


@pytest.fixture
def held(tmp_path):
    """Another store of this user, which a daemon of this user holds."""
    path = tmp_path / "held"
    with penstock.connect(f"file:{path}?durability=os") as queues:
        queues.create("orders")
    yield path
    stop_daemon(path)


COMMANDS = {
    "list": ["list", "--url", "file:{path}"],
    "push": ["push", "orders", "x", "--url", "file:{path}"],
    "push here": ["push", "orders", "x", "--url", "file:{path}?embedded=1"],
    "create": ["create", "other", "--url", "file:{path}"],
    "serve": ["serve", "--port", "0", "--data", "{path}"],
    "daemon run": ["daemon", "run", "{path}"],
    "daemon stop": ["daemon", "stop", "{path}"],
    "daemon status": ["daemon", "status", "{path}"],
    "mirror": ["mirror", "--once", "--from", "file:{path}", "--to", "redis://127.0.0.1:1"],
}


def words_of(command, path):
    return [word.format(path=path) for word in COMMANDS[command]]


@pytest.mark.root
@pytest.mark.parametrize("command", COMMANDS)
def test_the_store_of_another_user_is_refused_by_every_command(store, command):
    give_away(store)
    before = tree(store.parent)
    assert THEIRS in refusal(*words_of(command, store))
    assert tree(store.parent) == before


@pytest.mark.root
@pytest.mark.parametrize("name", ["store", "key", "journal", "journal/000000000000.seg", "daemon"])
@pytest.mark.parametrize("command", ["push", "push here", "serve", "daemon run"])
def test_what_another_user_put_into_a_store_is_refused(store, name, command):
    if (name, command) == ("daemon", "push here"):
        pytest.skip("a store that is opened here has no daemon")
    path = store / name
    if name == "daemon":
        path.mkdir()
    give_away(path)
    before = tree(store.parent)
    assert f"{path.name} {THEIRS}" in refusal(*words_of(command, store))
    assert tree(store.parent) == before


LEADING = {
    "a path in elsewhere": lambda held, daemon: (daemon / "elsewhere").write_text(
        f"{daemon_directory(held) / 'socket'}\n"
    ),
    "a link": lambda held, daemon: (daemon / "socket").symlink_to(
        daemon_directory(held) / "socket"
    ),
}


@pytest.mark.root
@pytest.mark.parametrize("way", LEADING)
@pytest.mark.parametrize("whose", ["store", "daemon"])
def test_a_path_to_the_socket_of_another_store_leads_nobody_there(store, held, way, whose):
    """A command would push to the wrong store, and `daemon stop` would end its daemon."""
    daemon = daemon_directory(store)
    daemon.mkdir()
    (daemon / "pid").write_text(f"{running_pid(held)}\n")
    LEADING[way](held, daemon)
    give_away(store if whose == "store" else daemon)
    before = tree(store)
    for command in ("push", "daemon stop", "daemon status"):
        assert THEIRS in refusal(*words_of(command, store))
    assert tree(store) == before
    assert running_pid(held) is not None
    with penstock.connect(f"file:{held}") as queues:
        assert queues.stats("orders").visible == 0


@pytest.mark.root
def test_the_archive_of_a_store_is_not_another_users_directory(store, tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    give_away(archive)
    url = f"file:{store}?embedded=1&durability=os&archive={archive}"
    assert f"{archive}: {THEIRS}" in refusal("list", "--url", url)
    assert list(archive.iterdir()) == []


@pytest.fixture
def theirs(tmp_path):
    """A file of another user, readable for all, that says what this user's should say."""
    path = tmp_path / "theirs"
    path.write_text(SECRET)
    path.chmod(0o644)
    give_away(path)
    return path


@pytest.mark.root
def test_a_config_file_of_another_user_is_refused_unless_an_argument_allows_it(tmp_path):
    config = tmp_path / "penstock.toml"
    config.write_text('account = "x"\n')
    give_away(config)
    said = refusal("serve", "--config", config)
    assert f"config: '{config}' {THEIRS}" in said
    assert "or say --insecure-other-owner" in said
    said = refusal("serve", PENSTOCK_CONFIG=str(config), PENSTOCK_INSECURE_OTHER_OWNER="1")
    assert THEIRS in said
    said = refusal("serve", "--config", config, "--insecure-other-owner")
    assert "account: 'x' is not twelve digits" in said


@pytest.mark.root
@pytest.mark.parametrize(
    "words",
    [
        ["daemon", "run", "{path}", "--listen", "127.0.0.1:0", "--token-file", "{theirs}"],
        ["serve", "--data", "{path}", "--tls-cert", "{theirs}", "--tls-key", "{theirs}"],
        ["serve", "--data", "{path}", "--carrot", "0", "--token-file", "{theirs}"],
        ["list", "--url", "penstock://127.0.0.1:1?token_file={theirs}"],
        ["list", "--url", "penstock://127.0.0.1:1?ca_file={theirs}"],
        ["list", "--url", "redis://127.0.0.1:1?password_file={theirs}"],
        ["list", "--url", "rediss://127.0.0.1:1?ca_file={theirs}"],
        ["list", "--url", "amqps://127.0.0.1:1?ca_file={theirs}"],
    ],
    ids=" ".join,
)
def test_a_secret_of_another_user_is_not_used(tmp_path, theirs, words):
    said = refusal(*(word.format(path=tmp_path / "new", theirs=theirs) for word in words))
    assert THEIRS in said
    assert SECRET not in said
    assert not (tmp_path / "new").exists()


def test_a_token_may_come_from_a_pipe_of_the_shell():
    """`--token-file <(COMMAND)`: the shell gives the path of a descriptor."""
    command = f"{sys.executable} -m penstock daemon run /dev/null --listen 127.0.0.1:0"
    done = subprocess.run(
        ["bash", "-c", f"{command} --token-file <(echo short)"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "holds 5 characters" in done.stderr


def lake_at(path: Path) -> Path:
    from penstock.spark.lake import Lake

    Lake.open(path, create=True)
    return path


@pytest.mark.root
@pytest.mark.parametrize("action", ["run", "status", "audit", "compact", "sql", "report"])
def test_the_lake_of_another_user_is_refused_unless_told_so(tmp_path, store, action):
    lake = lake_at(tmp_path / "lake")
    give_away(lake)
    before = tree(lake)
    more = {
        "run": ["--journal", store],
        "status": ["--journal", store],
        "sql": ["SELECT 1"],
        "report": ["--output", tmp_path / "page.html"],
    }
    words = ["pipeline", action, "--lake", lake, *more.get(action, [])]
    said = refusal(*words)
    assert f"{lake}: {THEIRS}" in said
    assert "or say --insecure-other-owner" in said
    assert tree(lake) == before


@pytest.mark.parametrize("name", ["lake.json", ".watch.lock"])
def test_a_link_in_a_lake_is_not_followed(tmp_path, store, name):
    lake = lake_at(tmp_path / "lake")
    target = tmp_path / "target"
    target.write_bytes((lake / "lake.json").read_bytes())
    (lake / name).unlink(missing_ok=True)
    (lake / name).symlink_to(target)
    words = ["pipeline", "run", "--lake", lake, "--journal", store, "--watch"]
    before = tree(lake)
    assert f"{name} is a symbolic link, not a regular file" in refusal(*words)
    assert tree(lake) == before


@pytest.mark.root
def test_the_script_that_starts_java_is_not_another_users(tmp_path, monkeypatch):
    from penstock.spark import java

    cache = tmp_path / "cache" / "penstock"
    cache.mkdir(parents=True)
    give_away(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    with pytest.raises(java.CacheUnusable, match=r"belongs to user 65534.*XDG_CACHE_HOME"):
        java.find_java()
    assert list(cache.iterdir()) == []
