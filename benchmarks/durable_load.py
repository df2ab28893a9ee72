"""A process that uses a store on files through the public API, as `durable_beside` tells it to.

    python durable_load.py URL

Each line of its input is a kind of work, a number of threads, the messages of a call and a number
of seconds; it answers with the messages a second. When its input ends, it empties the queue, checks
that each body pushed was pulled exactly once, and prints `sound`. It imports nothing but Penstock,
so that any checkout's can be put first in the path.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

import penstock

QUEUE = "bench"
BODY_BYTES = 256
_numbers = count()
_pushed: Counter[bytes] = Counter()
_pulled: Counter[bytes] = Counter()


def _bodies(batch: int) -> list[bytes]:
    made = [b"%0*d" % (BODY_BYTES, next(_numbers)) for _ in range(batch)]
    _pushed.update(made)
    return made


def push(queues: penstock.Queues, batch: int) -> Iterator[int]:
    """Pushes, a call at a time."""
    while True:
        if batch == 1:
            queues.push(QUEUE, _bodies(1)[0])
        else:
            queues.push_many(QUEUE, _bodies(batch))
        yield batch


def cycle(queues: penstock.Queues, batch: int) -> Iterator[int]:
    """Pushes, pulls and deletes, three calls for each batch."""
    pushes = push(queues, batch)
    while True:
        next(pushes)
        claims = queues.pull_many(QUEUE, batch)
        if batch == 1:
            queues.delete(claims[0])
        else:
            queues.delete_many(claims)
        _pulled.update(claim.body for claim in claims)
        yield batch


WORKS: dict[str, Callable[[penstock.Queues, int], Iterator[int]]] = {"push": push, "cycle": cycle}


def run(queues: penstock.Queues, work: str, threads: int, batch: int, seconds: float) -> float:
    """Works in several threads for this long; messages a second."""
    done = [0] * threads
    began_s = time.perf_counter()

    def loop(place: int) -> None:
        for messages in WORKS[work](queues, batch):
            done[place] += messages
            if time.perf_counter() - began_s >= seconds:
                return

    running = [threading.Thread(target=loop, args=(place,)) for place in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(done) / (time.perf_counter() - began_s)


def main() -> None:
    """Serves the lines of the input."""
    with penstock.connect(sys.argv[1]) as queues:
        queues.create(QUEUE)
        for line in sys.stdin:
            work, threads, batch, seconds = line.split()
            print(run(queues, work, int(threads), int(batch), float(seconds)), flush=True)
        while claims := queues.pull_many(QUEUE, 1_000):
            _pulled.update(claim.body for claim in claims)
            queues.delete_many(claims)
    print("sound" if _pulled == _pushed and set(_pulled.values()) == {1} else "unsound", flush=True)


if __name__ == "__main__":
    main()
