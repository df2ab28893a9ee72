"""Row 24 of the scorecard, for the console: a page of another site sees and changes nothing.

The page is shown by the browser that the console's own tests use; names of the site and of several
hosts lead to this machine, as after DNS rebinding.
"""

import json

import pytest

from tests.server.console.pages import row, until
from tests.server.sqs.test_pages import HOSTS, site

pytestmark = [pytest.mark.service("chromium"), pytest.mark.service("chromium-driver")]

ATTACKS = """
const settled = [], seen = [];
const purge = JSON.stringify({ queue: "orders" });
const send = JSON.stringify({ queue: "orders", body: "of a page" });
for (const base of bases) {
  for (const path of ["/", "/console", "/console/api/queues"]) {
    settled.push(new Promise((done) => {
      const frame = document.createElement("iframe");
      frame.onload = done;
      frame.src = base + path;
      document.body.append(frame);
    }));
  }
  for (const [name, body] of [["purge", purge], ["send", send], ["delete-queue", purge]]) {
    const address = base + "/console/api/" + name;
    const own = { "X-Penstock-Console": "1", "Content-Type": "application/json" };
    for (const mode of ["no-cors", "cors"]) for (const headers of [{}, own])
      settled.push(fetch(address, { method: "POST", mode, headers, body, credentials: "include" })
        .then((reply) => reply.text()).then((text) => seen.push(text)).catch(() => {}));
    navigator.sendBeacon(address, body);
    settled.push(new Promise((done) => {
      const frame = document.createElement("iframe");
      frame.name = "f" + Math.random();
      document.body.append(frame);
      const form = document.createElement("form");
      Object.assign(form, { method: "POST", enctype: "text/plain", target: frame.name });
      form.action = address;
      const input = document.createElement("input");
      // What a form sends as text is JSON, with a member that is made of its equals sign.
      input.name = body.slice(0, -1) + ', "x": "';
      input.value = '"}';
      form.append(input);
      document.body.append(form);
      frame.onload = done;
      form.submit();
    }));
  }
  settled.push(fetch(base + "/console/api/queues", { credentials: "include" })
    .then((reply) => reply.text()).then((text) => seen.push(text)).catch(() => {}));
  settled.push(new Promise((done) => {
    const source = new EventSource(base + "/console/api/events");
    source.onopen = () => { seen.push("events"); done(); };
    source.onerror = () => { source.close(); done(); };
  }));
}
Promise.all(settled).then(() => { document.title = "settled " + seen.filter(Boolean).length; });
"""


@pytest.mark.parametrize("is_signed_in", [False, True])
def test_a_page_of_another_site_sees_and_changes_nothing(browser, start_console, is_signed_in):
    keys = {"AKIAOWNER": "a secret"} if is_signed_in else {}
    server = start_console(keys=keys)
    server.queues.create("orders")
    server.queues.push("orders", b"kept")
    if is_signed_in:
        browser.visit(f"{server.url}/console")
        until(browser, "document.querySelector('.sign-in input')")
        browser.run(
            "const [key, secret] = document.querySelectorAll('.sign-in input'); "
            "key.value = 'AKIAOWNER'; secret.value = 'a secret'; "
            "document.querySelector('.sign-in button').click()"
        )
        until(browser, row("orders"))
    port = server.url.rsplit(":", 1)[1]
    bases = json.dumps([f"http://{host}:{port}" for host in HOSTS])
    page = f"<!DOCTYPE html><body><script>const bases = {bases};{ATTACKS}</script>"
    browser.complaints()
    with site(page) as address:
        browser.visit(address)
        until(browser, "document.title.startsWith('settled')")
        assert browser.run("return document.title") == "settled 0"
        framed = [each for each in browser.complaints() if "frame-ancestors" in each]
        browser.visit("about:blank")
    browser.complaints()
    # Where the host is taken, the page came and was not shown in the frame.
    assert framed
    assert [each.body for each in server.queues.peek("orders")] == [b"kept"]
    assert server.queues.list() == ["orders"]


REBOUND = [name for name in HOSTS if not name.startswith(("localhost", "127.", "0."))]


REBOUND_ATTACKS = """
const [base, body] = arguments, seen = [];
const own = { "X-Penstock-Console": "1", "Content-Type": "application/json" };
const asked = [["purge", { method: "POST", headers: own, body }], ["queues", {}], ["events", {}],
  ["queues", { headers: { "Sec-Fetch-Site": "none" } }]];
// A connection that the browser has made in advance leads to the site yet.
const isSite = (reply) => (reply.headers.get("Server") || "").startsWith("BaseHTTP");
return (async () => {
  for (const [name, options] of asked) {
    let reply;
    do reply = await fetch(base + name, options); while (isSite(reply));
    seen.push(reply.status);
  }
  return seen;
})();
"""


@pytest.mark.parametrize("host", REBOUND)
def test_a_page_whose_name_leads_here_afterwards_is_of_no_console(browser, start_console, host):
    # The browser has the page of a site at this name and port, which then leads to the server: it
    # is of the same origin as the console.
    with site("<!DOCTYPE html><title>site</title>") as address:
        port = int(address.rsplit(":", 1)[1].strip("/"))
        browser.visit(f"http://{host}:{port}/")
        assert browser.run("return document.title") == "site"
    server = start_console(port=port)
    server.queues.create("orders")
    server.queues.push("orders", b"kept")
    base = f"http://{host}:{port}/console/api/"
    seen = browser.run(REBOUND_ATTACKS, base, json.dumps({"queue": "orders"}))
    assert seen == [403] * 4
    browser.visit("about:blank")
    browser.complaints()
    assert [each.body for each in server.queues.peek("orders")] == [b"kept"]
    # A program that is told the name is not a page.
    assert server.read("queues", host=f"{host}:{port}", sec_fetch_site="none")[0] == 200
    status, told = server.read("queues", host=f"{host}:{port}")
    assert (status, f"--allow-host {host}" in told["error"]) == (403, True)


def test_a_name_that_was_allowed_has_a_console(start_console):
    server = start_console(allow_hosts=["box.local"])
    assert server.read("queues", host="box.local")[0] == 200
    assert server.ask("/console", host="box.local")[0] == 200
