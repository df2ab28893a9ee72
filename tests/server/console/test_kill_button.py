"""The button of `penstock demo` that ends the server; no other server has it."""

import json
import signal
import subprocess
import urllib.request

import pytest

from penstock.errors import InvalidField
from penstock.settings import ServerSettings, read_settings
from tests.browser import Browser
from tests.cli.conftest import EXECUTABLE
from tests.server.console.pages import until

HEADERS = {"x-penstock-console": "1", "content-type": "application/json"}


def test_a_server_without_the_button_has_no_such_action(console):
    status, _, said = console.change("kill-server", {})
    assert (status, said) == (404, {"error": "The console has no such action."})
    assert console.read("session")[1]["kill_button"] is False


def test_the_button_ends_the_server_by_sigkill_and_only_for_its_own_page(tmp_path):
    words = ["serve", "--data", tmp_path / "s", "--port", "0", "--json", "--kill-button"]
    with subprocess.Popen(
        [EXECUTABLE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        address = f"{json.loads(server.stdout.readline())['url']}/console/api/kill-server"
        foreign = urllib.request.Request(address, b"{}", {**HEADERS, "origin": "http://evil.test"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(foreign, timeout=60)
        assert server.poll() is None
        with pytest.raises(OSError, match=r"."):
            urllib.request.urlopen(urllib.request.Request(address, b"{}", HEADERS), timeout=60)
        assert server.wait(60) == -signal.SIGKILL
        assert "kills this server" in server.stderr.read()


def test_only_an_argument_gives_the_button_and_only_on_loopback(tmp_path):
    assert read_settings({"kill_button": True}, {}).kill_button
    assert not ServerSettings().kill_button
    with pytest.raises(InvalidField, match="kill_button, in the environment"):
        read_settings({}, {"PENSTOCK_KILL_BUTTON": "1"})
    away = {"host": "0.0.0.0", "insecure_without_keys": True, "insecure_without_tls": True}
    with pytest.raises(InvalidField, match="only on loopback"):
        read_settings({"kill_button": True, **away}, {})


@pytest.mark.service("chromium")
@pytest.mark.service("chromium-driver")
def test_in_a_browser_the_button_kills_the_server_and_the_page_comes_back_with_it(tmp_path):
    def start(port):
        words = ["serve", "--data", tmp_path / "s", "--port", port, "--json", "--kill-button"]
        server = subprocess.Popen([EXECUTABLE, *words], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        return server, json.loads(server.stdout.readline())["url"]

    server, url = start("0")
    try:
        with Browser(tmp_path / "profile") as browser:
            browser.visit(f"{url}/console")
            until(browser, "document.getElementById('kill')")
            until(browser, "document.getElementById('link').textContent === 'Live'")
            browser.run("document.getElementById('kill').click()")
            assert server.wait(60) == -signal.SIGKILL
            until(browser, "document.getElementById('link').textContent === 'No connection'")
            server.stdout.close()
            server, _ = start(url.rpartition(":")[2])
            until(browser, "document.getElementById('link').textContent === 'Live'")
    finally:
        server.kill()
        server.communicate()
