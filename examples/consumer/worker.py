"""A worker that makes thumbnails: the consumer loop, retries, and a clean stop.

    export PENSTOCK_URL=file:./data
    penstock create thumbnails --dead-letter thumbnails-dead --max-receives 3
    penstock push thumbnails cat.png
    penstock push thumbnails broken.png
    python worker.py --until-empty

It prints:

    made a thumbnail of cat.png
    broken.png failed at delivery 1
    broken.png failed at delivery 2
    broken.png failed at delivery 3
"""

import os
import signal
import sys

import penstock


def make_thumbnail(name: str) -> None:
    """The work. Raises OSError for a picture that cannot be read."""
    if name.startswith("broken"):
        raise OSError(f"{name}: not a picture")
    print("made a thumbnail of", name, flush=True)


def work(claim: penstock.Claim) -> None:
    """Works on one message; an exception releases it, to be delivered again."""
    name = claim.body.decode()
    try:
        make_thumbnail(name)
    except OSError:
        print(name, "failed at delivery", claim.receives, flush=True)
        raise


def main() -> None:
    """Works until SIGTERM or Ctrl-C, or until the queue is empty."""
    queues = penstock.connect(os.environ["PENSTOCK_URL"])
    idle = 1.0 if "--until-empty" in sys.argv else None
    consumer = queues.consume("thumbnails", backoff=0.1, idle=idle)
    for number in (signal.SIGTERM, signal.SIGINT):
        # The message in hand is finished, and deleted, before the loop ends.
        signal.signal(number, lambda *_: consumer.stop())
    consumer.run(work)
    queues.close()


if __name__ == "__main__":
    main()
