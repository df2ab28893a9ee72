"""A program that tests kill, or whose disk they let fail: it appends, syncs, and prints ids.

    child.py DIRECTORY COUNT [BODY_BYTES [BACKGROUND]]

It prints `reopened N` with the number of entries that it finds when it starts, `answered N` after
the sync of entry N, and `refused ERROR` if an append or a sync is refused. After that it tries both
again, and prints `still refused` or `accepted` for each.
"""

import sys

from penstock.errors import PenstockError
from penstock.journal.segments import Segments

VERSION = b"TESTDATA"


def print_line(*words):
    # In one write, so that a kill cannot leave half a line.
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


def body(number, size):
    return (b"%d " % number * (size // 2 + 1))[:size]


def main(path, count, size=100, background=0):
    segments = Segments.open(path, file_bytes=65536, background=bool(background))
    print_line("reopened", segments.next_id - 1)
    try:
        for _ in range(count):
            entry_id, _ = segments.append([body(segments.next_id, size)], version=VERSION)
            segments.sync()
            print_line("answered", entry_id)
    except PenstockError as error:
        print_line("refused", type(error).__name__, error)
        for call in (lambda: segments.append([b"more"], version=VERSION), segments.sync):
            try:
                call()
                print_line("accepted")
            except PenstockError as again:
                print_line("still refused", type(again).__name__)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
