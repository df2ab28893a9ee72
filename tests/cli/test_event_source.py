"""`penstock lambda` as a user starts it: until it is stopped, and with arguments that are wrong."""

import json
import os
import signal
import subprocess
import sys

import pytest

from penstock.cli import main

HANDLER = """
def handler(event, context):
    return {"batchItemFailures": [
        {"itemIdentifier": each["messageId"]}
        for each in event["Records"] if each["body"] == "bad"
    ]}
"""

SLOW_HANDLER = """
def handler(event, context):
    print("begun", flush=True)
    with open("gate", "rb") as gate:
        gate.read(1)
"""


@pytest.fixture
def url(quick_path, monkeypatch):
    (quick_path / "shop.py").write_text(HANDLER)
    monkeypatch.chdir(quick_path)
    url = f"file:{quick_path}/store?embedded=1"
    assert main(["create", "orders", "--visibility-timeout", "30s", "--url", url]) == 0
    return url


def test_it_goes_on_until_it_is_stopped_and_prints_each_batch(url, quick_path):
    for body in ("a", "bad"):
        assert main(["push", "orders", body, "--url", url]) == 0
    words = ["lambda", "shop:handler", "--queue", "orders", "--report-failures", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, "--url", url], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert line == {"messages": 2, "failed": 1, "filtered": 0, "error": ""}


def test_an_interrupt_of_the_terminal_lets_an_invocation_end(url, quick_path):
    (quick_path / "slow.py").write_text(SLOW_HANDLER)
    os.mkfifo(quick_path / "gate")
    assert main(["push", "orders", "a", "--url", url]) == 0
    words = ["lambda", "slow:handler", "--queue", "orders", "--timeout", "30s", "--url", url]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        os.killpg(process.pid, signal.SIGINT)
        gate = os.open(quick_path / "gate", os.O_RDWR)
        os.write(gate, b"x")
        out, err = process.communicate(timeout=60)
        os.close(gate)
    assert (process.returncode, out, err) == (0, b"1 of 1 messages done\n", b"")


def test_it_ends_with_burst_when_no_message_is_visible(url, capsys):
    main(["push", "orders", "a", "--url", url])
    capsys.readouterr()
    assert main(["lambda", "shop:handler", "--queue", "orders", "--burst", "--url", url]) == 0
    assert capsys.readouterr().out == "1 of 1 messages done\n"


def test_a_burst_in_which_an_invocation_failed_ends_with_status_1(url, capsys):
    for body in ("a", "bad", "b"):
        main(["push", "orders", body, "--url", url])
    capsys.readouterr()
    words = ["--queue", "orders", "--batch-size", "1", "--report-failures", "--burst", "--url", url]
    assert main(["lambda", "shop:handler", *words]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{done} of 1 messages done" for done in (1, 0, 1)
    ]


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["shop:none", "--queue", "orders"], 3, "module 'shop' has no function 'none'"),
        (["nowhere:handler", "--queue", "orders"], 3, "No module named 'nowhere'"),
        (["shop:handler", "--queue", "none"], 3, "there is no queue 'none'"),
        (["shop:handler"], 2, "required: --queue"),
        (["shop:handler", "--queue", "orders", "--timeout", "0"], 2, "outside 0 to 900 s"),
        (["shop:handler", "--queue", "orders", "--timeout", "31"], 3, "visibility timeout, 30 s"),
        (["shop:handler", "--queue", "orders", "--batch-size", "0"], 3, "outside 1 to 10000"),
        (["shop:handler", "--queue", "orders", "--filter", "none"], 2, "cannot read 'none'"),
        (["shop:handler", "--queue", "orders", "--filter", "shop.py"], 3, "filter: JSON"),
    ],
)
def test_wrong_arguments_say_so_in_one_line_and_touch_no_message(url, capfd, words, status, told):
    main(["push", "orders", "a", "--url", url])
    capfd.readouterr()
    assert main(["lambda", *words, "--burst", "--url", url]) == status
    shown = capfd.readouterr()
    assert (told in shown.err, shown.err.count("\n"), shown.out) == (True, 1, "")
    assert main(["peek", "orders", "--url", url]) == 0
