"""The pages of a queue and of a message, in a real browser."""

import json

import pytest

from tests.server.console.pages import EVIL, click, fill, show, until

pytestmark = [pytest.mark.service("chromium"), pytest.mark.service("chromium-driver")]


def test_messages_are_shown_searched_selected_and_deleted(page, console):
    queues = console.queues
    queues.create("orders")
    queues.push_many("orders", [json.dumps({"order": n}).encode() for n in range(60)])
    queues.push("orders", b"needle", attributes={"kind": "vip"})
    show(page, console, "#/queue/orders")
    until(page, "document.querySelectorAll('.messages tbody tr').length === 50")
    assert page.texts(".t-visible b") == ["61"]
    click(page, "Next page")
    until(page, "document.querySelectorAll('.messages tbody tr').length === 11")
    fill(page, ".table-head input", "kind=vip")
    until(page, "document.querySelector('.status').textContent === '1 message found in 61.'")
    assert page.texts(".messages tbody .c-body") == ["needle"]
    page.run("document.querySelector('.messages tbody input').click()")
    click(page, "Delete")
    until(page, "document.querySelector('dialog[open]')")
    page.run("document.querySelector('dialog[open] .danger').click()")
    until(page, "document.querySelector('.t-visible b').textContent === '60'")
    assert queues.stats("orders").visible == 60


def test_a_message_is_sent_and_its_life_drawn(page, console):
    console.queues.create("orders")
    show(page, console, "#/queue/orders")
    until(page, "document.querySelector('.actions button')")
    click(page, "Send a message")
    page.run(
        "const text = document.querySelector('dialog textarea'); text.value = arguments[0]; "
        "document.querySelector('dialog form').requestSubmit()",
        '{"big": 12345678901234567890, "list": [1, {}]}',
    )
    until(page, "document.querySelectorAll('.messages tbody tr').length === 1")
    claim = console.queues.pull("orders", holder="worker mail-7 (pid 4121)")
    console.queues.release(claim)
    console.queues.pull("orders", holder="worker mail-3")
    page.run("document.querySelector('.messages a').click()")
    until(page, "document.querySelectorAll('.life li').length >= 3")
    assert "Delivered 2 times." in page.texts(".sentences p")
    holders = [text for text in page.texts(".life b") if text.startswith("worker")]
    assert holders == ["worker mail-7 (pid 4121)", "worker mail-3"]
    # A number keeps its digits.
    (body,) = page.texts(".json")
    assert '"big": 12345678901234567890' in body
    assert body.count("\n") == 6


def test_a_body_is_opened_below_its_row(page, console):
    console.queues.create("orders")
    console.queues.push("orders", b'{"list": [1, 2]}')
    show(page, console, "#/queue/orders")
    until(page, "document.querySelector('.open-body')")
    page.press("j", "Tab", "Enter")
    until(page, "document.querySelector('.whole .json')")
    assert page.texts(".whole .json") == ['{\n  "list": [\n    1,\n    2\n  ]\n}']
    assert console.queues.stats("orders").counts.pulled == 0
    page.press("Enter")
    until(page, "!document.querySelector('.whole')")


def test_the_page_of_a_message_follows_what_happens_to_it(page, console):
    console.queues.create("orders")
    message_id = console.queues.push("orders", b"x").id
    show(page, console, f"#/message/orders/{message_id}")
    until(page, "document.querySelector('.actions .danger')")
    claim = console.queues.pull("orders", holder="worker mail-7 (pid 4121)")
    until(page, "document.querySelector('.life')?.textContent.includes('worker mail-7')")
    console.queues.delete(claim)
    until(page, "document.querySelector('.life .ended')")
    assert page.texts(".actions button") == []
    assert any("orker mail-7 (pid 4121) deleted it" in each for each in page.texts(".sentences p"))


def test_a_redrive_shows_how_far_it_is_and_can_be_stopped(page, console):
    console.queues.create("orders", dead_letter="orders-dead", max_receives=1)
    console.queues.create("elsewhere")
    console.queues.push_many("orders-dead", [b"x"] * 2_500)
    show(page, console, "#/queue/orders-dead")
    until(page, "document.querySelector('.t-visible b').textContent === '2,500'")
    page.press("r")
    until(page, "document.querySelector('dialog[open]')")
    fill(page, "dialog input", "elsewhere")
    # Stopped while the first part is moved.
    page.run(
        "const [close, go] = document.querySelectorAll('dialog footer button'); "
        "go.click(); close.click()"
    )
    until(page, "document.querySelector('.toast')?.textContent.includes('then stopped')")
    assert console.queues.stats("elsewhere").visible == 1_000
    page.press("r")
    fill(page, "dialog input", "elsewhere")
    click(page, "Move all")
    until(page, "document.querySelector('.t-visible b').textContent === '0'")
    assert console.queues.stats("elsewhere").visible == 2_500


def test_a_server_that_masks_shows_no_body_in_the_browser(browser, start_console):
    server = start_console(mask_messages=True)
    server.queues.create("orders")
    message_id = server.queues.push("orders", b"a secret", attributes={"kind": "a secret"}).id
    for place, shown in (
        ("#/queue/orders", ".c-body .soft"),
        (f"#/message/orders/{message_id}", ".body .soft"),
    ):
        show(browser, server, place)
        assert "mask" in until(browser, f"document.querySelector('{shown}')?.textContent")
        assert "a secret" not in browser.run("return document.body.innerHTML")


def test_hostile_texts_run_nothing(page, console):
    """Rows 24 and 29 of the scorecard: what others wrote is only ever text."""
    name = "evil-queue"
    console.queues.create(name)
    message_id = console.queues.push(name, EVIL.encode(), attributes={EVIL: EVIL}, group=EVIL).id
    claim = console.queues.pull(name, holder=EVIL)
    console.queues.release(claim)
    for place in (
        f"#/queue/{name}",
        f"#/message/{name}/{message_id}",
        "#/queue/%3Cimg%20src%3Dx%20onerror%3Ddocument.title%3D'run'%3E",
        "#/message/%3Cscript%3E/x",
        "#/queue/%E0%A4%A",
    ):
        show(page, console, place)
        until(page, "document.querySelector('main').children.length > 0")
        until(page, "!document.querySelector('main').textContent.includes('Looking')")
        assert page.run("return document.title") != "run"
        assert page.run("return document.querySelectorAll('main script, main img').length") == 0
    show(page, console, f"#/queue/{name}")
    until(page, "document.querySelector('.c-body code')")
    assert page.texts(".c-body code") == [EVIL]
    # The browser itself notes each answer that is an error.
    page.complaints()


def test_settings_are_edited_and_dangerous_things_asked_for(page, console):
    console.queues.create("orders")
    console.queues.push("orders", b"x")
    show(page, console, "#/queue/orders")
    until(page, "document.querySelector('.settings dl')")
    click(page, "Edit")
    fill(page, "dialog .setting input", "90 days")
    page.run("document.querySelector('dialog form').requestSubmit()")
    until(page, "document.querySelector('dialog .wrong').textContent.includes('not a number')")
    fill(page, "dialog .setting input", "90s")
    page.run("document.querySelector('dialog form').requestSubmit()")
    until(page, "document.querySelector('.settings dd').textContent.startsWith('1 m 30 s')")
    assert console.queues.describe("orders").settings.visibility_timeout == 90
    click(page, "Purge")
    until(page, "document.querySelector('dialog[open] .danger').disabled")
    fill(page, "dialog[open] input", "orders")
    page.run("document.querySelector('dialog[open] .danger').click()")
    until(page, "document.querySelector('.t-visible b').textContent === '0'")


def test_a_queue_is_paused_and_resumed_by_a_button_and_by_its_settings(page, console):
    console.queues.create("orders")
    show(page, console, "#/queue/orders")
    until(page, "document.querySelector('.actions button')")
    click(page, "Pause")
    until(page, "document.querySelector('.why').textContent.includes('paused')")
    assert console.queues.stats("orders").paused
    until(page, "[...document.querySelectorAll('.actions button')].some("
        "(each) => each.textContent === 'Resume')")  # fmt: skip
    click(page, "Edit")
    page.run(
        "const fields = document.querySelectorAll('dialog .setting'); "
        "[...fields].find((each) => each.textContent.includes('paused'))"
        ".querySelector('input').click(); "
        "document.querySelector('dialog form').requestSubmit()"
    )
    until(page, "!document.querySelector('.why').textContent.includes('paused')")
    assert not console.queues.stats("orders").paused


def test_a_page_at_a_million_messages_comes_at_once(page, console):
    console.queues.create("large")
    for _ in range(100):
        console.queues.push_many("large", [b"x"] * 10_000)
    last = console.queues.push("large", b"the last one").id
    show(page, console, "#/queue/large")
    until(page, "document.querySelectorAll('.messages tbody tr').length === 50")
    # As far into the queue as one can be.
    shown = console.read("messages?queue=large&after=999990")[1]["messages"]
    assert len(shown) == 11
    assert shown[-1]["body"] == "the last one"
    show(page, console, f"#/message/large/{last}")
    until(page, "document.querySelector('.body')?.textContent === 'the last one'")
