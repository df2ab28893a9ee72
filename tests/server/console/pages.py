"""What tests of the console do in a browser: wait, press keys and buttons, find rows."""

import json
import time

LATE_S = 30
EVIL = "<img src=x onerror=document.title='run'><script>document.title='run'</script>"


def until(browser, script, *arguments):
    """Waits until a script returns a true value, and returns it."""
    give_up = time.monotonic() + LATE_S
    while not (found := browser.run(f"return {script}", *arguments)):
        if time.monotonic() > give_up:
            shown = browser.run("return document.body.innerText")
            raise AssertionError(f"never true: {script}; the page shows: {shown}")
    return found


def row(name):
    """A script that finds the row of a queue."""
    return (
        "[...document.querySelectorAll('tbody tr')].find((each) => "
        f"each.querySelector('a').textContent === {json.dumps(name)})"
    )


def click(browser, text):
    """Presses the button with this text."""
    browser.run(
        "[...document.querySelectorAll('button')]"
        ".find((each) => each.textContent === arguments[0]).click()",
        text,
    )


def fill(browser, selector, value):
    """Writes into a field, as somebody who types it."""
    browser.run(
        "const node = document.querySelector(arguments[0]); node.value = arguments[1]; "
        "node.dispatchEvent(new Event('input', { bubbles: true }))",
        selector,
        value,
    )


def show(browser, console, place):
    """Opens a page of the console anew."""
    browser.visit("about:blank")
    browser.visit(f"{console.url}/console{place}")
