"""Row 24 of the scorecard, for the endpoint: a web page in a real Chromium changes nothing.

The page is on another site. The browser resolves names to this machine and does not check requests
to the local network, as older browsers do not.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlencode

import pytest

from tests.browser import Browser
from tests.server.sqs.asking import make, send, shown
from tests.server.sqs.conftest import Local

pytestmark = [pytest.mark.service("chromium"), pytest.mark.service("chromium-driver")]

SITE = "evil.example"
HOSTS = ["localhost", "127.0.0.1", "0.0.0.0", "shop.test", "box.local", "penstock", "a.internal"]
CHECKS = [
    "LocalNetworkAccessChecks",
    "BlockInsecurePrivateNetworkRequests",
    "PrivateNetworkAccessSendPreflights",
    "PrivateNetworkAccessForNavigations",
    "HttpsUpgrades",
]
FLAGS = [
    f"--host-resolver-rules={','.join(f'MAP {name} 127.0.0.1' for name in [SITE, *HOSTS[3:]])}",
    f"--disable-features={','.join(CHECKS)}",
]
PRESIGNED = {
    "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
    "X-Amz-Credential": "any/20260101/us-east-1/sqs/aws4_request",
    "X-Amz-Date": "20260101T000000Z",
    "X-Amz-Expires": "60",
    "X-Amz-SignedHeaders": "host",
    "X-Amz-Signature": "0" * 64,
}
ATTACKS = """
const settled = [];
const wait = (start) =>
  settled.push(new Promise((done) => { start(done); setTimeout(done, 2000); }));
for (const base of bases) {
  for (const query of queries) {
    wait((done) => {
      const image = new Image();
      image.referrerPolicy = "no-referrer";
      image.onload = image.onerror = done;
      image.src = base + "/?" + query;
    });
    wait((done) => {
      const script = document.createElement("script");
      script.referrerPolicy = "no-referrer";
      script.onload = script.onerror = done;
      script.src = base + "/?" + query;
      document.head.append(script);
    });
    wait((done) => {
      const frame = document.createElement("iframe");
      frame.referrerPolicy = "no-referrer";
      frame.onload = done;
      frame.src = base + "/?" + query;
      document.body.append(frame);
    });
    for (const type of ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"]) {
      wait((done) => {
        const frame = document.createElement("iframe");
        frame.name = "f" + Math.random();
        document.body.append(frame);
        const form = document.createElement("form");
        form.method = "POST";
        form.enctype = type;
        form.target = frame.name;
        form.action = base + "/?" + query;
        for (const pair of query.split("&")) {
          const input = document.createElement("input");
          [input.name, input.value] = pair.split("=").map(decodeURIComponent);
          form.append(input);
        }
        document.body.append(form);
        frame.onload = done;
        form.submit();
      });
    }
    for (const mode of ["no-cors", "cors"]) {
      for (const [method, body] of [["GET", undefined], ["POST", query]]) {
        const options = { method, body, mode, referrerPolicy: "no-referrer" };
        settled.push(fetch(base + "/?" + query, options).catch(() => {}));
        const headers = { "X-Amz-Target": "AmazonSQS.PurgeQueue", Authorization: "x" };
        settled.push(fetch(base + "/?" + query, { ...options, headers }).catch(() => {}));
      }
    }
    const rules = document.createElement("script");
    rules.type = "speculationrules";
    const wanted = [{ source: "list", urls: [base + "/?" + query], eagerness: "immediate" }];
    rules.textContent = JSON.stringify({ prefetch: wanted, prerender: wanted });
    document.head.append(rules);
    try { new WebSocket(base.replace("http", "ws") + "/?" + query); } catch {}
    navigator.sendBeacon(base + "/", new URLSearchParams(query));
    const json = { type: "application/x-amz-json-1.0" };
    try { navigator.sendBeacon(base + "/", new Blob(["{}"], json)); } catch {}
  }
}
Promise.all(settled).then(() => { document.title = "settled"; });
"""


@contextmanager
def site(page):
    """A web server of another site with one page; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{SITE}:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def queries(url):
    """Requests of a page that would change queues, unsigned and with a forged signature."""
    wanted = [
        {"Action": "DeleteQueue", "QueueUrl": url},
        {"Action": "PurgeQueue", "QueueUrl": url},
        {"Action": "SendMessage", "QueueUrl": url, "MessageBody": "of a page"},
        {"Action": "CreateQueue", "QueueName": "of-a-page"},
    ]
    return [urlencode(each) for each in [*wanted, wanted[0] | PRESIGNED, wanted[3] | PRESIGNED]]


def refused(server):
    return server.call(
        lambda: sum(
            count
            for (_, status), count in server.running._endpoint.answered.items()
            if status == 403
        )
    )


@pytest.fixture(params=["without keys", "with keys"])
def attacked(request, query_data):
    """A server and a client of its owner."""
    keys = {} if request.param == "without keys" else {"AKIAOWNER": "a secret of the owner"}
    server = Local(query_data, keys=keys)
    try:
        owner = {
            name: value
            for key, secret in keys.items()
            for name, value in (("aws_access_key_id", key), ("aws_secret_access_key", secret))
        }
        yield server, server.client(**owner)
    finally:
        server.close()


def test_a_page_of_another_site_changes_nothing(attacked, tmp_path, record_property):
    local, client = attacked
    url = make(client, "target")
    send(client, url, "kept")
    port = local.url.rsplit(":", 1)[1]
    script = f"const bases = {json.dumps([f'http://{host}:{port}' for host in HOSTS])};"
    script += f"const queries = {json.dumps(queries(url))};{ATTACKS}"
    page = f"<!DOCTYPE html><title>loading</title><body><script>{script}</script>"
    with site(page) as address, Browser(tmp_path, flags=FLAGS) as browser:
        browser.visit(address)
        while browser.run("return document.title") != "settled":
            pass
    # The browser has really sent the requests.
    tried = refused(local)
    record_property("figure", f"{tried} requests of a page refused")
    assert tried >= 4 * len(queries(url)) * len(HOSTS)
    assert client.list_queues()["QueueUrls"] == [url]
    assert shown(client, url)["ApproximateNumberOfMessages"] == "1"
