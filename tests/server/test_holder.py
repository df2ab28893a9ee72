"""Row 23: which process holds a store, and the checks before a directory is written to."""

import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import penstock
from penstock.backends.remote.daemon import SERVE, daemon_directory, running_pid
from penstock.errors import StoreUnusable, UnavailableError
from penstock.server import holder
from tests.conftest import IN_CI
from tests.server.conftest import TIMEOUT_S, DaemonProcess, end_daemon

NOBODY = 65_534


def tree(directory):
    """Every file below a directory: its mode, its owner, the time of its last change, its bytes."""
    entries = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        found = path.lstat()
        content = None
        if path.is_symlink():
            content = os.readlink(path)
        elif stat.S_ISREG(found.st_mode):
            content = path.read_bytes()
        entries[str(path)] = (found.st_mode, found.st_uid, found.st_mtime_ns, content)
    return entries


def run_daemon(store, *words, user=None):
    """Run a daemon until it ends, as another user if one is given; its status and error output."""
    command = [sys.executable, "-m", "penstock.server.daemon", str(store), "--idle", "1", *words]
    if user is not None:
        command = as_user(user, command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stderr


def as_user(user, command):
    check_python_of(user)
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]


@functools.cache
def check_python_of(user):
    """Skips if that user cannot run the Python of these tests, as in a private home directory."""
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    tried = subprocess.run([*become, sys.executable, "-c", "import penstock"], check=False)
    if tried.returncode:
        give_up = pytest.fail if IN_CI else pytest.skip
        give_up(f"user {user} cannot run {sys.executable} with penstock")


def make_store(path):
    with penstock.connect(f"file:{path}?durability=os") as queues:
        queues.create("orders")
        queues.push("orders", b"kept")
    end_daemon(path)


def give_to(path, user):
    for each in [path, *path.rglob("*")]:
        os.lchown(each, user, user)


@pytest.fixture
def open_path():
    """A directory that every user can enter and write to; pytest's are private to its user."""
    path = Path(tempfile.mkdtemp(prefix="penstock-"))
    path.chmod(0o777)
    yield path
    for each in path.iterdir():
        if (each / "daemon").is_dir():
            # Root is refused what belongs to another user, too.
            owner = (each / "daemon").stat()
            os.setegid(owner.st_gid)
            os.seteuid(owner.st_uid)
            try:
                end_daemon(each)
            finally:
                os.seteuid(os.getuid())
                os.setegid(os.getgid())
    shutil.rmtree(path)


# A directory that is not a store.


def foreign_folder(path):
    path.mkdir()
    (path / "file").write_text("text")
    (path / "daemon").mkdir(mode=0o755)
    (path / "daemon" / "pid").write_text("notes about process identifiers\n")
    (path / "daemon" / "output").write_text("notes about output\n")
    return path


def test_a_directory_that_is_not_a_store_stays_unchanged_even_with_a_daemon_directory(tmp_path):
    path = foreign_folder(tmp_path / "folder")
    before = tree(path)
    with pytest.raises(StoreUnusable, match="is not empty, and is not a Penstock store"):
        penstock.connect(f"file:{path}")
    assert run_daemon(path)[0] == 6
    assert tree(path) == before


def test_a_directory_with_only_a_daemon_directory_stays_unchanged(tmp_path):
    path = foreign_folder(tmp_path / "folder")
    (path / "file").unlink()
    before = tree(path)
    with pytest.raises(StoreUnusable, match="is not empty, and is not a Penstock store"):
        penstock.connect(f"file:{path}")
    assert tree(path) == before


def test_a_daemon_directory_that_is_a_link_is_not_followed(store, tmp_path):
    make_store(store)
    elsewhere = foreign_folder(tmp_path / "folder") / "daemon"
    for each in daemon_directory(store).iterdir():
        each.unlink()
    daemon_directory(store).rmdir()
    daemon_directory(store).symlink_to(elsewhere)
    before = tree(tmp_path)
    with pytest.raises(StoreUnusable, match="daemon is a symbolic link, not a directory"):
        penstock.connect(f"file:{store}")
    assert tree(tmp_path) == before
    daemon_directory(store).unlink()


@pytest.fixture(params=["symbolic", "hard"])
def linked(request, store, tmp_path):
    """A link in place of one of the daemon's files, to a file that must not be changed."""
    make_store(store)
    target = tmp_path / "target"
    target.write_text("text")

    def link(name):
        place = daemon_directory(store) / name
        place.unlink(missing_ok=True)
        place.symlink_to(target) if request.param == "symbolic" else place.hardlink_to(target)
        return place

    yield link
    assert target.read_text() == "text"


@pytest.mark.parametrize("name", ["output", "port"])
def test_a_file_of_the_daemon_that_is_a_link_is_replaced_and_not_written_through(
    linked, store, name
):
    linked(name)
    with penstock.connect(f"file:{store}") as queues:
        assert queues.list() == ["orders"]


def test_the_path_of_a_socket_is_not_read_through_a_link(store, tmp_path):
    make_store(store)
    pointer = daemon_directory(store) / "elsewhere"
    pointer.symlink_to(tmp_path / "socket")
    with pytest.raises(StoreUnusable, match="elsewhere is a symbolic link, not a regular file"):
        penstock.connect(f"file:{store}")
    pointer.unlink()


def test_a_lock_that_is_a_link_is_refused(linked, store):
    place = linked("pid")
    with pytest.raises(StoreUnusable, match=str(place)):
        penstock.connect(f"file:{store}")
    place.unlink()


def test_a_directory_whose_marker_is_a_link_is_not_a_store(store, tmp_path):
    make_store(tmp_path / "real")
    store.mkdir()
    (store / "store").symlink_to(tmp_path / "real" / "store")
    before = tree(tmp_path)
    with pytest.raises(StoreUnusable, match="store is a symbolic link, not a regular file"):
        penstock.connect(f"file:{store}")
    assert tree(tmp_path) == before


# A real second user.


@pytest.mark.service("util-linux")
@pytest.mark.root
def test_root_serves_the_store_of_another_user_only_with_the_option(open_path):
    path = open_path / "store"
    make_store(path)
    give_to(path, NOBODY)
    before = tree(path)
    with pytest.raises(StoreUnusable, match=r"belongs to user 65534.*insecure-other-owner"):
        penstock.connect(f"file:{path}")
    assert tree(path) == before
    with penstock.connect(f"file:{path}?other_owner=1") as queues:
        assert queues.stats("orders").visible == 1
    end_daemon(path)


def penstock_refuses(*words):
    """Whether the command refuses another user's store in one line."""
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return (done.returncode, done.stderr.count("\n")) == (6, 1) and (
        "belongs to user 65534" in done.stderr
    )


@pytest.mark.service("util-linux")
@pytest.mark.root
def test_root_opens_the_store_of_another_user_itself_only_with_the_option(open_path):
    """Row 23: files of root, mode 0600, would lock the owner out."""
    path = open_path / "store"
    url = f"file:{path}?embedded=1&durability=os"
    with penstock.connect(url) as queues:
        queues.create("orders")
    (path / "journal" / "000000000000.seg").unlink()
    give_to(path, NOBODY)
    before = tree(path)
    with pytest.raises(StoreUnusable, match=r"belongs to user 65534.*other_owner=1"):
        penstock.connect(url)
    assert penstock_refuses("--url", url, "list")
    assert penstock_refuses("serve", "--port", "0", "--store", url)
    assert penstock_refuses("check", "--accept-loss", path)
    assert tree(path) == before
    assert not penstock_refuses("check", "--accept-loss", "--insecure-other-owner", path)
    with penstock.connect(f"{url}&other_owner=1") as queues:
        assert queues.list() == []


@pytest.mark.service("util-linux")
@pytest.mark.root
def test_root_creates_no_store_in_the_directory_of_another_user(open_path):
    path = open_path / "store"
    path.mkdir()
    give_to(path, NOBODY)
    before = tree(path)
    with pytest.raises(StoreUnusable, match="belongs to user 65534"):
        penstock.connect(f"file:{path}")
    assert tree(path) == before


@pytest.mark.service("util-linux")
@pytest.mark.root
def test_a_user_may_have_a_store_in_a_directory_that_root_created_for_its_group(open_path):
    path = open_path / "volume"
    path.mkdir()
    os.chown(path, 0, NOBODY)
    path.chmod(0o2770)
    assert run_daemon(path, user=NOBODY) == (0, "")
    assert (path / "store").stat().st_uid == NOBODY


ASK = """
import sys, penstock
try:
    with penstock.connect(sys.argv[1]) as queues:
        print(queues.list())
except penstock.PenstockError as error:
    print(type(error).__name__, error)
"""


def ask_as(user, url):
    command = as_user(user, [sys.executable, "-c", ASK, url])
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.service("util-linux")
@pytest.mark.root
def test_the_socket_refuses_another_user_even_if_the_file_modes_allow_it(open_path):
    path = open_path / "store"
    with penstock.connect(f"file:{path}"):
        before = ask_as(NOBODY, f"file:{path}")
        assert before.startswith("StoreUnusable ")
        assert "ermission denied" in before
        # With these modes only SO_PEERCRED protects the store, at both ends.
        for each in (path, daemon_directory(path)):
            each.chmod(0o777)
        (daemon_directory(path) / "socket").chmod(0o777)
        assert "its daemon belongs to user 0, not to this one" in ask_as(NOBODY, f"file:{path}")
        assert running_pid(path) is not None
        assert answer_to(NOBODY, daemon_directory(path) / "socket").startswith(
            "this store belongs to user 0; user 65534 may not use it"
        )


SEND_HELLO = """
import socket, sys
from penstock.wire.frames.frames import FrameDecoder, Hello, decode_welcome, encode_hello
from penstock.wire.frames.frames import server_limits
link = socket.socket(socket.AF_UNIX)
link.settimeout(60)
link.connect(sys.argv[1])
try:
    link.sendall(encode_hello(Hello("test")))
except BrokenPipeError:
    pass
decoder = FrameDecoder("server", server_limits())
frames = []
while not frames:
    frames = decoder.feed(link.recv(65536))
try:
    print(decode_welcome(frames[0]))
except Exception as error:
    print(error)
"""


def answer_to(user, socket):
    """The server's answer to a client that does not check the owner of the daemon."""
    command = as_user(user, [sys.executable, "-c", SEND_HELLO, str(socket)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.service("util-linux")
@pytest.mark.root
def test_a_user_who_cannot_read_the_token_is_refused_on_tcp(open_path):
    token = open_path / "token"
    token.write_text("a secret that only root can read\n")
    token.chmod(0o600)
    guess = open_path / "guess"
    guess.write_text("a secret that is a wrong guess\n")
    guess.chmod(0o644)
    daemon = DaemonProcess(
        open_path / "store", "--listen", "127.0.0.1:0", "--token-file", str(token)
    )
    url = f"penstock://127.0.0.1:{daemon.port}"
    try:
        assert "ermission denied" in ask_as(NOBODY, f"{url}?token_file={token}")
        assert "ProtocolError" in ask_as(NOBODY, url)
        assert "ProtocolError" in ask_as(NOBODY, f"{url}?token_file={guess}")
        with penstock.connect(f"{url}?token_file={token}") as queues:
            assert queues.list() == []
    finally:
        daemon.stop()


# A holder that does not answer.


def test_the_error_names_a_holder_that_neither_answers_nor_ends(store, monkeypatch):
    monkeypatch.setattr(holder, "_ENDING_S_MAX", 0.1)
    with penstock.connect(f"file:{store}?durability=os"):
        pid = running_pid(store)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            taking = holder.StoreHolder(store, SERVE, other_owner=False)
            with pytest.raises(UnavailableError, match=f"process {pid} holds it, and has neither"):
                taking.take(lambda: pytest.fail("the store was opened"))
        finally:
            os.kill(pid, signal.SIGCONT)
