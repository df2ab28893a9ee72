"""A first-in, first-out queue of byte strings that the processes of a host share, by a daemon.

The daemon of `file:PATH` does all input and output; this is one queue of that store, with the
methods of `PersistedQueue`. An item is a message. A push has a dedup id, and a pop is a pull with
an attempt id and a delete, so that both can be repeated after a lost connection.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Literal, Self

from penstock.client import Queues
from penstock.errors import (
    AttemptLapsed,
    InvalidField,
    QueueExists,
    QueueNotFound,
    StaleReceipt,
    StoreUnusable,
)
from penstock.journal.header_page import check_file_size
from penstock.persisted import check_data_bytes, check_place
from penstock.public import Settings, to_ms
from penstock.service import (
    BODY_BYTES_MAX,
    TTL_MS_MAX,
    Message,
    PeekFrom,
    check_number,
)
from penstock.url import BackendUrl, load_backend

# The queue's name in the store, for `penstock --url file:PATH`.
NAME: Final = "queue"
MAX_SIZE: Final = 1024 * 1024 * 1024
# What an item takes of `max_size` at least, as in `PersistedQueue`.
_OVERHEAD_BYTES: Final = 40
# How long an item is hidden whose process ends in the middle of a pop.
_POP_S: Final = 30.0
_PAGE: Final = 100


class SharedQueue:
    """A FIFO queue of bytes that survives crashes, for any number of processes on a host.

        with SharedQueue("spool") as queue:
            queue.push(b"first")
            queue.push(b"gone in a minute", ttl=60)
            queue.peek()            # b"first", still there
            queue.pop()             # b"first", gone for good
            for item in queue:      # reads all items, removes none
                ...

    `path`         a directory; made if missing, then readable by its owner only.
    `file_size`    bytes of each file, a multiple of 4096; a queue that exists keeps its own.
    `max_size`     how many bytes the items may take: their data, and one item for each 40 bytes at
                   most; then push raises QueueFull.
    `default_ttl`  seconds an item lives unless push has a `ttl`; None or 0: 366 days.
    `durability`   "sync" or "os", as of `file:PATH`; the first opener decides.

    An option that is left out is that of the queue, if it exists; another value than the queue has
    raises InvalidField. The first opener starts the daemon, which ends when nobody uses it. Threads
    may share one SharedQueue.

    pop is at most once: a crash between its return and your use of the item loses it. A process
    that is killed or interrupted within a pop gives its item back, to its place, in half a minute.

    Raises StoreUnusable if the directory cannot be used, StoreFull if the disk is full, and
    BackendLost if there is no daemon and none can be started.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        file_size: int | None = None,
        max_size: int | None = None,
        default_ttl: float | None = None,
        *,
        durability: Literal["sync", "os"] | None = None,
    ) -> None:
        wanted: dict[str, Any] = {}
        if max_size is not None:
            check_number("max_size", max_size, _OVERHEAD_BYTES, 2**63 - 1)
            wanted["max_bytes"] = max_size
        if default_ttl is not None:
            wanted["retention"] = _ttl_ms("default_ttl", default_ttl) / 1_000
        self.path = os.path.abspath(path)
        with suppress(FileNotFoundError, NotADirectoryError):
            if any(name.endswith(".seg") for name in os.listdir(self.path)):
                raise StoreUnusable(f"{path}: is a PersistedQueue, for one process at a time")
        if file_size is not None:
            check_file_size(file_size)
        options = {"durability": durability, "file_size": file_size}
        given = {name: str(value) for name, value in options.items() if value is not None}
        url = BackendUrl(f"file:{self.path}", "file", self.path, given)
        self._queues = Queues(load_backend(url).open_service(url, None), None)
        try:
            settings = self._open(wanted)
        except BaseException:
            self._queues.close()
            raise
        self._max_bytes = settings.max_bytes or MAX_SIZE

    def _open(self, wanted: dict[str, Any]) -> Settings:
        """Makes the queue if there is none; its settings, which must be those that are wanted."""
        try:
            settings = self._queues.describe(NAME).settings
        except QueueNotFound:
            size = wanted.get("max_bytes", MAX_SIZE)
            with suppress(QueueExists):
                self._queues.create(
                    NAME,
                    max_bytes=size,
                    max_messages=size // _OVERHEAD_BYTES,
                    max_body_bytes=BODY_BYTES_MAX,
                    retention=wanted.get("retention", TTL_MS_MAX / 1_000),
                )
            settings = self._queues.describe(NAME).settings
        for name, option in (("max_bytes", "max_size"), ("retention", "default_ttl")):
            has = getattr(settings, name)
            if wanted.get(name, has) != has:
                raise InvalidField(
                    f"{option}: the queue in {self.path} was made with {has:g}; leave it out"
                )
        return settings

    def push(self, data: bytes | bytearray | memoryview, ttl: float | None = None) -> None:
        """Adds an item at the end; it lives `ttl` seconds (None: the default; 0: 366 days).

        Raises QueueFull, StoreFull, MessageTooLarge or InvalidField, and adds nothing.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidField(f"an item is bytes, not {type(data).__name__}")
        ttl_s = None if ttl is None else _ttl_ms("ttl", ttl) / 1_000
        self._queues.push(NAME, bytes(data), ttl=ttl_s, dedup_id=_new_id())

    def pop(self) -> bytes | None:
        """Removes the oldest item that has not expired and returns it; None if there is none.

        An item that another process is popping is passed over.
        """
        while True:
            try:
                claim = self._queues.pull(NAME, visibility_timeout=_POP_S, attempt_id=_new_id())
            except AttemptLapsed:
                continue  # the answer came after a lost connection, and too late
            if claim is None:
                return None
            try:
                self._queues.delete(claim)
            except StaleReceipt:
                continue  # this process stood still for so long that the item was given back
            return claim.body

    def peek(self, n: int = 0) -> bytes | None:
        """Returns an item without removing it: the oldest, or the one `n` places behind it.

        None if there are fewer. To go through all items, iterate over the queue.
        """
        check_place(n)
        for place, item in enumerate(self._messages(min(n + 1, _PAGE))):
            if place == n:
                return item.body
        return None

    def __iter__(self) -> Iterator[bytes]:
        """Yields the items from the oldest on, removing none; items pushed meanwhile come, too."""
        return (item.body for item in self._messages(_PAGE))

    def _messages(self, page: int) -> Iterator[Message]:
        after = 0
        while messages := self._queues.service.execute(PeekFrom(NAME, after, page)):
            yield from messages
            after = messages[-1].sequence

    def size(self) -> int:
        """Returns how many items there are."""
        return self._queues.stats(NAME).messages

    def size_bytes(self) -> int:
        """Returns how many bytes of data the items have."""
        return self._queues.stats(NAME).stored_bytes or 0

    def capacity(self, data_bytes: int = 0) -> int:
        """Returns how many items of `data_bytes` each fit into `max_size`.

        Without an argument: the most items that could ever be held, each of them small.
        """
        return self._max_bytes // max(check_data_bytes(data_bytes), _OVERHEAD_BYTES)

    def __len__(self) -> int:
        return self.size()

    def __bool__(self) -> bool:
        """An open queue is true even when it is empty: test `len` or `peek` for items."""
        return True

    def close(self) -> None:
        """Ends the connection; the items stay, and so does the daemon as long as others use it."""
        self._queues.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _new_id() -> str:
    return os.urandom(16).hex()


def _ttl_ms(name: str, ttl_s: float) -> int:
    """A time to live in milliseconds; 0 is the longest. Raises InvalidField."""
    if ttl_s == 0:
        return TTL_MS_MAX
    try:
        return to_ms("ttl", ttl_s)
    except InvalidField as error:
        raise InvalidField(str(error).replace("ttl", name, 1)) from None
