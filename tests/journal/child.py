"""A program for tests to run, starve and kill: it appends, syncs, and prints each answered id.

    child.py DIRECTORY COUNT [BODY_BYTES [BACKGROUND]]

It prints `answered N` after the sync of entry N, `refused ERROR` if an append or a sync is refused,
and `reopened N` with the entries it finds when it starts. After a refusal it tries both again, and
says `still refused` or `went on`.
"""

import sys

from penstock.errors import PenstockError
from penstock.journal.segments import Segments

VERSION = b"TESTDATA"


def say(*words):
    # One write, so that a kill cannot leave half a line.
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


def body(number, size):
    return (b"%d " % number * (size // 2 + 1))[:size]


def main(path, count, size=100, background=0):
    segments = Segments.open(path, file_bytes=65536, background=bool(background))
    say("reopened", segments.next_id - 1)
    try:
        for _ in range(count):
            entry_id, _ = segments.append([body(segments.next_id, size)], version=VERSION)
            segments.sync()
            say("answered", entry_id)
    except PenstockError as error:
        say("refused", type(error).__name__, error)
        for call in (lambda: segments.append([b"more"], version=VERSION), segments.sync):
            try:
                call()
                say("went on")
            except PenstockError as again:
                say("still refused", type(again).__name__)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
