"""An e-mail task: a timeout, retries with growing waits, a rate limit, and a failed task.

In one terminal, and then in another, both in this directory:

    penstock worker mail:app
    python mail.py

It prints:

    anna@example.com: sent at attempt 1
    ben@example.com: sent at attempt 3
    carla: failed: GiveUp: 'carla' is not an address
"""

from penstock.tasks import Backoff, GiveUp, TaskApp, TaskFailed, current

app = TaskApp(name="mail")


class MailServerBusy(Exception):
    """The mail server cannot accept mail now."""


@app.task(timeout=10, retries=5, backoff=Backoff(first=0.1, longest=60), rate="50/s", result_ttl=60)
def send(address: str, text: str) -> str:
    """Sends one mail; for Ben, the server of the example is busy at the first two attempts."""
    context = current()
    if "@" not in address:
        raise GiveUp(f"{address!r} is not an address")
    if address.startswith("ben") and context.attempt < 3:
        raise MailServerBusy("450 try again later")
    context.logger.info("%s characters to %s", len(text), address)
    return f"sent at attempt {context.attempt}"


def main() -> None:
    """Pushes three mails and waits for their results."""
    pushed = {
        address: send.push(address, "Your order is on its way.")
        for address in ("anna@example.com", "ben@example.com", "carla")
    }
    for address, mail in pushed.items():
        try:
            print(f"{address}: {mail.get(timeout=60)}")
        except TaskFailed as failed:
            print(f"{address}: failed: {failed.error}")


if __name__ == "__main__":
    main()
