"""The examples that a person would start from: each prints what its docstring says."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import penstock

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 60


@pytest.fixture
def copied(tmp_path):
    """A function that copies an example, so that nothing is written into the repository."""

    def copy(name):
        return Path(shutil.copytree(EXAMPLES / name, tmp_path / name))

    return copy


@pytest.fixture
def server(tmp_path):
    """The URL of an endpoint that is a process of its own."""
    command = [sys.executable, "-m", "penstock", "serve", "--json", "--port", "0"]
    with subprocess.Popen(
        [*command, "--data", str(tmp_path / "data")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


def expected(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring is not None
    return textwrap.dedent(docstring.partition("It prints:\n\n")[2]).strip()


def run(path, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, path.name, *arguments],
        cwd=path.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_shop_packs_orders_and_finds_the_bad_one_in_the_dead_letter_queue(copied, server):
    shop = copied("orders") / "shop.py"
    assert run(shop, AWS_ENDPOINT_URL_SQS=server) == expected(shop)


@pytest.fixture
def thumbnails(tmp_path):
    """The URL of a store with two pictures to work on."""
    url = f"file:{tmp_path}/data?embedded=1"
    with penstock.connect(url) as queues:
        queues.create("thumbnails", dead_letter="thumbnails-dead", max_receives=3)
        queues.push_many("thumbnails", [b"cat.png", b"broken.png"])
    return url


def test_the_worker_makes_thumbnails_and_gives_up_a_broken_picture(copied, thumbnails):
    worker = copied("consumer") / "worker.py"
    assert run(worker, "--until-empty", PENSTOCK_URL=thumbnails) == expected(worker)
    with penstock.connect(thumbnails) as queues:
        assert queues.stats("thumbnails").messages == 0
        assert [dead.body for dead in queues.peek("thumbnails-dead", 2)] == [b"broken.png"]


def test_the_worker_ends_at_sigterm_with_status_0(copied, thumbnails):
    worker = copied("consumer") / "worker.py"
    with subprocess.Popen(
        [sys.executable, worker.name],
        cwd=worker.parent,
        env={**os.environ, "PENSTOCK_URL": thumbnails},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made a thumbnail of cat.png\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def post(url, body, **headers):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return reply.status, json.load(reply)


def test_the_service_answers_once_a_mail_is_kept_and_a_repeated_request_adds_none(copied, tmp_path):
    app = copied("service") / "app.py"
    store = f"file:{tmp_path}/data?embedded=1"
    socket_line = "Uvicorn running on "
    with subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "--port", "0", "app:app"],
        cwd=app.parent,
        env={**os.environ, "PENSTOCK_URL": store},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if socket_line in line)
            url = line.partition(socket_line)[2].split()[0]
            mail = {"to": "anna@example.com", "text": "hello"}
            first = post(f"{url}/mails", mail, **{"Idempotency-Key": "42"})
            assert first[0] == 202
            assert post(f"{url}/mails", mail, **{"Idempotency-Key": "42"}) == first
            with pytest.raises(urllib.error.HTTPError, match="422"):
                post(f"{url}/mails", {"text": "to nobody"})
            with urllib.request.urlopen(f"{url}/health", timeout=TIMEOUT_S) as reply:
                assert json.load(reply) == {"waiting": 1}
        finally:
            process.terminate()
            process.communicate()
    with penstock.connect(store) as queues:
        assert json.loads(queues.peek("mails", 1)[0].body) == mail


def test_every_folder_of_examples_says_what_is_in_it():
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert [path.name for path in folders if not (path / "README.md").is_file()] == []
