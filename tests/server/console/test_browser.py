"""The console in a real browser: what it shows, by keyboard, with hostile names, and live."""

import time

import pytest

from tests.server.console.pages import LATE_S, click, fill, row, show, until

pytestmark = [pytest.mark.service("chromium"), pytest.mark.service("chromium-driver")]


def test_the_first_screen_shows_each_queue_and_follows_it(page, console):
    console.queues.create("orders", dead_letter="orders-dead", max_receives=3)
    console.queues.create("idle")
    page.visit(f"{console.url}/")
    assert until(page, f"{row('orders')}?.querySelector('.c-visible b').textContent") == "0"
    console.queues.push("orders", b"x")
    until(page, f"{row('orders')}.querySelector('.c-visible b').textContent === '1'")
    claim = console.queues.pull("orders")
    until(page, f"{row('orders')}.querySelector('.c-flight').textContent.startsWith('1')")
    console.queues.delete(claim)
    console.queues.create("later")
    until(page, row("later"))
    console.queues.remove("idle")
    until(page, f"!{row('idle')}")
    # The dead-letter queue is beside its source, and not a row of its own.
    assert page.texts(".chip span") == ["orders-dead"]
    assert page.texts("tbody th a") == ["orders", "later"]
    assert page.texts(".verdict h1") == ["Nothing is stuck."]


def test_dead_letters_are_counted_beside_their_source(page, console):
    console.queues.create("orders", dead_letter="orders-dead", max_receives=1)
    console.queues.push("orders", b"x")
    console.queues.release(console.queues.pull("orders"))
    page.visit(f"{console.url}/")
    assert until(page, "document.querySelector('.chip.bad')?.textContent") == "1orders-dead"
    assert page.run("return document.querySelector('.verdict').dataset.kind") == "warn"


FOCUS = "return document.activeElement.textContent"


def test_it_is_used_by_keyboard(page, console):
    for name in ("orders", "mail", "mail-dead"):
        console.queues.create(name)
    page.visit(f"{console.url}/")
    until(page, row("orders"))
    page.press("/", *"mail")
    assert page.texts("tbody th a") == ["mail", "mail-dead"]
    page.press("Enter")
    assert page.run(FOCUS) == "mail"
    page.press("j")
    assert page.run(FOCUS) == "mail-dead"
    page.press("Enter")
    until(page, "location.hash === '#/queue/mail-dead'")
    until(page, "document.querySelector('[data-key=s]')")
    # Whoever cannot see the page is at its beginning.
    assert page.run("return document.activeElement.id") == "main"
    page.press("s")
    until(page, "document.querySelector('dialog[open] textarea') === document.activeElement")
    page.press(*"a body", "Tab", "Tab", "Tab", "Tab", "Tab", "Tab", "Tab", "Enter")
    until(page, "document.querySelector('.open-body code')?.textContent === 'a body'")
    assert console.queues.peek("mail-dead")[0].body == b"a body"
    page.press("j", "x")
    until(page, "document.querySelector('.acts span').textContent === '1 selected'")
    page.press("u")
    until(page, row("orders"))
    page.press("?")
    assert page.run("return document.querySelector('dialog[open]').getAttribute('aria-label')")
    assert "new queue" in page.texts("dialog dd")
    page.press("Escape", "n")
    until(page, "document.querySelector('dialog[open] input') === document.activeElement")
    page.press(*"invoices", "Tab", "Space", "Enter")
    until(page, "location.hash === '#/queue/invoices.fifo'")
    assert console.queues.describe("invoices.fifo").settings.fifo


def test_the_link_that_skips_leads_to_the_content(page, console):
    console.queues.create("orders")
    page.visit(f"{console.url}/console#/queue/orders")
    until(page, "document.querySelector('.settings dl')")
    page.run("document.querySelector('.skip').focus()")
    page.press("Enter")
    assert page.run("return [document.activeElement.id, location.hash]") == [
        "main",
        "#/queue/orders",
    ]


def test_a_column_sorts_and_an_id_leads_to_its_message(page, console):
    for number, name in enumerate(("a", "b", "c")):
        console.queues.create(name)
        console.queues.push_many(name, [b"x"] * (number + 1))
    message = console.queues.peek("b")[0].id
    page.visit(f"{console.url}/")
    until(page, row("c"))
    click(page, "Depth, last hour")
    assert page.texts("tbody th a") == ["c", "b", "a"]
    assert page.run("return document.querySelector('[aria-sort]').textContent") == (
        "Depth, last hour"
    )
    click(page, "Depth, last hour")
    assert page.texts("tbody th a") == ["a", "b", "c"]
    fill(page, "input[type=search]", message)
    page.press("/", "Enter", "Enter")
    until(page, "document.querySelector('.crumbs')?.textContent === 'Queues / b'")


NAMED = {"button", "link", "textbox", "searchbox", "checkbox", "combobox", "dialog", "spinbutton"}


def test_every_page_fits_a_phone_and_has_a_name_for_each_control(page, console):
    console.queues.create("orders", dead_letter="orders-dead", max_receives=1)
    console.queues.push("orders", b'{"error": "SMTP 550"}' + b"x" * 500, attributes={"k" * 60: "v"})
    console.queues.release(console.queues.pull("orders"))
    message = console.queues.peek("orders-dead")[0].id
    page.resize(390, 844, is_phone=True)
    try:
        for place, ready, opens in (
            ("#/", ".chip.bad", "New queue"),
            ("#/queue/orders-dead", ".messages tbody tr", "Send a message"),
            ("#/queue/orders-dead", ".settings dl", "Edit"),
            (f"#/message/orders-dead/{message}", ".life li", "Edit and send again"),
            ("#/dead", ".groups details", "Redrive all"),
            ("#/tasks", "h1", ""),
        ):
            show(page, console, place)
            until(page, f"document.querySelector('{ready}')")
            wide = "return document.documentElement.scrollWidth"
            assert (place, page.run(wide)) == (place, 390)
            if opens:
                click(page, opens)
                until(page, "document.querySelector('dialog[open]')")
            without = [role for role, name in page.names() if role in NAMED and not name.strip()]
            assert (place, opens, without) == (place, opens, [])
            assert page.run("return document.querySelectorAll('h1').length") == 1
    finally:
        page.resize(1280, 900)


def test_a_thousand_queues_are_shown_without_a_jump(page, console):
    names = [f"tenant-{number:04d}" for number in range(1_000)]
    for name in names:
        console.queues.create(name)
    page.visit(f"{console.url}/")
    until(page, "document.querySelectorAll('tbody tr').length === 1000")
    place = "document.querySelector('tbody tr').getBoundingClientRect().top"
    before = page.run(f"return [{place}, document.querySelector('table').offsetWidth]")
    console.queues.push("tenant-0500", b"x" * 1_000)
    until(page, f"{row('tenant-0500')}.querySelector('.c-visible b').textContent === '1'")
    after = page.run(f"return [{place}, document.querySelector('table').offsetWidth]")
    assert after == before
    assert page.texts("tbody th a") == names


def test_nothing_moves_when_a_page_becomes_longer_than_the_window(page, console):
    console.queues.create("orders")
    page.visit(f"{console.url}/")
    until(page, row("orders"))
    places = (
        "return ['.bar', '#theme', 'h1', 'table', '.totals'].map((each) => "
        "document.querySelector(each).getBoundingClientRect()).map((each) => "
        "[each.left, each.right])"
    )
    is_long = "document.documentElement.scrollHeight > innerHeight"
    assert not page.run(f"return {is_long}")
    *before, _ = page.run(places)
    # The bar ends with the window: there is no empty strip beside it.
    assert before[0] == [0, page.run("return innerWidth")]
    for number in range(40):
        console.queues.create(f"tenant-{number}")
    until(page, is_long)
    assert page.run("return document.documentElement.clientWidth < innerWidth")
    *after, totals = page.run(places)
    assert after == before
    # What is at the edge is not below the scroll bar.
    assert totals[1] <= page.run("return document.documentElement.clientWidth")


def test_a_server_that_goes_away_is_told_and_followed_when_it_is_back(browser, console):
    console.queues.create("orders")
    browser.visit(f"{console.url}/")
    until(browser, row("orders"))
    console.stop()
    until(browser, "document.getElementById('link').textContent === 'No connection'")
    # What is not known any more is not called well.
    assert browser.texts(".verdict h1") == ["The server does not answer."]
    console.start()
    console.queues.push("orders", b"x")
    until(browser, "document.getElementById('link').textContent === 'Live'")
    until(browser, f"{row('orders')}.querySelector('.c-visible b').textContent === '1'")
    assert browser.texts(".verdict h1") == ["Nothing is stuck."]
    browser.complaints()  # the browser itself notes each connection that failed


def test_a_hidden_page_has_no_connection(page, console):
    console.queues.create("orders")
    page.visit(f"{console.url}/")
    until(page, row("orders"))
    streams = console.running._console.streams
    assert len(streams._streams) == 1
    page.run(
        "Object.defineProperty(document, 'hidden', { value: true, configurable: true }); "
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    give_up = time.monotonic() + LATE_S
    while streams._streams:
        assert time.monotonic() < give_up
    page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    console.queues.push("orders", b"x")
    until(page, f"{row('orders')}.querySelector('.c-visible b').textContent === '1'")


def test_a_sign_in_opens_the_console_of_a_server_with_keys(browser, start_console):
    server = start_console(keys={"AKIAOWNER": "a secret"})
    server.queues.create("orders")
    browser.visit(f"{server.url}/")
    until(browser, "document.querySelector('.sign-in input[name=key]')")
    fill = (
        "const [key, secret] = document.querySelectorAll('.sign-in input'); "
        "key.value = 'AKIAOWNER'; secret.value = arguments[0]; "
        "document.querySelector('.sign-in button').click()"
    )
    browser.run(fill, "wrong")
    until(browser, "document.querySelector('.wrong').textContent.includes('wrong')")
    browser.run(fill, "a secret")
    until(browser, row("orders"))
    browser.complaints()  # the browser itself notes the answer 403


def test_a_server_that_is_read_only_offers_no_change(browser, start_console):
    server = start_console(host="0.0.0.0", insecure_without_keys=True, insecure_without_tls=True)
    server.queues.create("orders", dead_letter="dead", max_receives=1)
    message_id = server.queues.push("dead", b"x").id
    for place, ready in (
        ("#/", "tbody tr"),
        ("#/queue/dead", ".messages tbody tr"),
        (f"#/message/dead/{message_id}", ".facts"),
        ("#/dead", ".groups details"),
    ):
        show(browser, server, place)
        until(browser, f"document.querySelector('{ready}')")
        assert browser.texts("#who") == ["Read-only"]
        offered = browser.run(
            "return [...document.querySelectorAll('main button')].filter((each) => "
            "each.offsetParent && each.matches('.primary, .danger, [data-key]'))"
            ".map((each) => each.textContent)"
        )
        assert offered == []
