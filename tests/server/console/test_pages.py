"""Who may see and change what in the console, and that SDKs get what they got before."""

import json

import boto3
import pytest

KEYS = {"AKIAOWNER": "a secret of the owner"}
BROWSER = {"accept": "text/html,application/xhtml+xml", "sec_fetch_site": "none"}


def test_a_browser_gets_the_console_where_sdks_get_the_api(console):
    for path in ("/", "/console", "/console/"):
        status, headers, body = console.ask(path, **BROWSER)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b"/console/static/app.js" in body
    for headers in ({}, {"accept": "*/*"}, {"accept": "text/html", "authorization": "x"}):
        status, got, body = console.ask("/", **headers)
        assert (status, got["Content-Type"]) == (404, "text/xml")
    sqs = boto3.client(
        "sqs",
        endpoint_url=console.url,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    sqs.create_queue(QueueName="console")
    assert sqs.list_queues()["QueueUrls"] == [f"{console.url}/000000000000/console"]
    sqs.close()


def test_every_answer_forbids_scripts_and_frames_of_others(console):
    for path in ("/console", "/console/static/app.js", "/console/api/session"):
        _, headers, _ = console.ask(path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_static_files_are_only_those_of_the_console(console):
    for path in ("draw.js", "draw.css", "console.css", "queues.js"):
        assert console.ask(f"/console/static/{path}")[0] == 200
    for path in ("../pages.py", "%2e%2e/pages.py", "pages.py", "", "app.js/"):
        assert console.ask(f"/console/static/{path}")[0] == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_what_a_page_of_another_site_may_have_sent_is_refused(console, headers):
    """Row 24 of the scorecard."""
    console.queues.create("orders")
    assert console.read("queues", **headers)[0] == 403
    assert console.change("sign-in", {}, **headers)[0] == 403


def test_a_change_without_the_header_of_the_page_is_refused(console):
    for headers in (
        {"content_type": "application/json"},
        {"x_penstock_console": "1"},
        {"x_penstock_console": "1", "content_type": "text/plain"},
    ):
        status, _, body = console.ask("/console/api/sign-in", "POST", "{}", **headers)
        assert status == 403
        assert "x-penstock-console" in json.loads(body)["error"]


@pytest.mark.parametrize("body", ["{", "[]", b'{"\xff": 1}', '{"a": ' + "[" * 60_000])
def test_a_body_that_cannot_be_read_is_refused(console, body):
    headers = {"x_penstock_console": "1", "content_type": "application/json"}
    status, _, answer = console.ask("/console/api/create", "POST", body, **headers)
    assert status == 400
    assert json.loads(answer)["error"].startswith("body: ")


def test_with_keys_nothing_is_seen_before_signing_in(start_console):
    server = start_console(keys=KEYS, queues={"orders": {}})
    assert server.read("session") == (
        200,
        {"may_look": False, "may_change": False, "has_keys": True, "key": None},
    )
    assert server.read("queues")[0] == 403
    assert server.read("events")[0] == 403
    wrong = {"key": "AKIAOWNER", "secret": "a guess"}
    assert server.change("sign-in", wrong)[0] == 403
    status, headers, _ = server.change("sign-in", {"key": "AKIAOWNER", "secret": KEYS["AKIAOWNER"]})
    assert status == 200
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    token = cookie.partition(";")[0]
    assert server.read("queue?name=orders", cookie=token)[1]["queue"]["name"] == "orders"
    assert server.read("session", cookie=token)[1]["key"] == "AKIAOWNER"
    assert server.change("sign-out", {}, cookie=token)[0] == 200
    assert server.read("queues", cookie=token)[0] == 403


def test_guessing_a_secret_ends_after_some_tries_and_is_told(start_console, capfd):
    server = start_console(keys=KEYS)
    for guess in range(10):
        server.change("sign-in", {"key": "AKIAOWNER", "secret": str(guess)})
    status, _, shown = server.change("sign-in", {"key": "AKIAOWNER", "secret": KEYS["AKIAOWNER"]})
    assert status == 403
    assert "wait" in shown["error"]
    lines = [each for each in capfd.readouterr().err.splitlines() if "could not sign in" in each]
    assert len(lines) == 11
    assert lines[0].startswith("penstock: console: somebody at 127.0.0.1 could not sign in")


def test_a_server_beyond_loopback_without_keys_is_read_only(start_console):
    server = start_console(host="0.0.0.0", insecure_without_keys=True, insecure_without_tls=True)
    shown = server.read("session")[1]
    assert (shown["may_look"], shown["may_change"]) == (True, False)
