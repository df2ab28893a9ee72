"""Opens `memory:` and `file:PATH`: an engine in this process, or the process that holds the store.

`file:PATH?embedded=1` opens the store here, for this process alone. Without it, `remote` reaches
the process that holds the store, and starts a daemon if there is none.
"""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.engine import Engine
from penstock.clock import Clock
from penstock.errors import InvalidField
from penstock.journal import MemoryJournal
from penstock.service import AsyncQueueService, QueueService
from penstock.url import BackendUrl, read_url


def open_service(url: BackendUrl, clock: Clock | None) -> QueueService:
    """The blocking service. Raises InvalidField, or an error that says why it cannot be opened."""
    if url.is_in_this_process:
        return BlockingEngine(_open(url, clock))
    from penstock.backends.remote import open as remote

    return remote.open_service(url, clock)


async def open_async_service(url: BackendUrl, clock: Clock | None) -> AsyncQueueService:
    """The asyncio service. Raises InvalidField, or an error that says why it cannot be opened."""
    if url.is_in_this_process:
        from penstock.backends.engine.asynchronous import AsyncEngine

        return AsyncEngine(_open(url, clock))
    from penstock.backends.remote import open as remote

    return await remote.open_async_service(url, clock)


@contextmanager
def look_at(url: BackendUrl) -> Iterator[QueueService]:
    """The store at `file:PATH` for a caller that only looks; no daemon is started for it.

    If no process holds the store, it is opened in this one as long as the context lasts; clients
    that come meanwhile wait. Raises what `open_service` raises.
    """
    from penstock.backends.engine.store import open_engine as open_store
    from penstock.backends.remote.starting import START_S_MAX, is_held, only_starter

    deadline_s = time.monotonic() + START_S_MAX
    with only_starter(os.path.abspath(url.path), deadline_s):
        if not is_held(url.path, deadline_s):
            engine = open_store(url.path, background=False, other_owner=url.is_on("other_owner"))
            # Nothing is dropped: that would need the archive that the store is used with.
            engine.upkeep = None
            with closing(BlockingEngine(engine)) as service:
                yield service
            return
    with closing(open_service(url, None)) as service:
        yield service


def open_engine(url: str | BackendUrl, clock: Clock | None = None) -> Engine:
    """The engine at a URL, `memory:` or `file:PATH`, in this process and for it alone.

    Raises InvalidField, or an error that says why the store cannot be opened.
    """
    backend_url = url if isinstance(url, BackendUrl) else read_url(url)
    if backend_url.scheme not in ("memory", "file"):
        raise InvalidField(
            f"url: {backend_url.shown!r} is not opened in this process; use memory: or file:PATH"
        )
    return _open(backend_url, clock)


def _open(url: BackendUrl, clock: Clock | None) -> Engine:
    return _open_store(url, clock) if url.scheme == "file" else _open_memory(url, clock)


def _open_memory(url: BackendUrl, clock: Clock | None) -> Engine:
    url.check_options({"history"})
    if url.rest:
        raise InvalidField(f"url: a memory engine has no address; use memory:, not {url.shown!r}")
    return Engine(MemoryJournal(url.whole_number("history", 0)), clock)


def _open_store(url: BackendUrl, clock: Clock | None) -> Engine:
    # Imported late: memory: needs none of it, and a test suite should start fast.
    from penstock.backends.engine.store import open_engine as open_store
    from penstock.journal.file_journal import check_durability
    from penstock.journal.segments import FILE_BYTES

    url.check_options(
        {
            "embedded",
            "durability",
            "interval_ms",
            "archive",
            "file_size",
            "accept_loss",
            "other_owner",
        }
    )
    return open_store(
        url.path,
        durability=check_durability(url.options.get("durability", "sync")),
        interval_ms=url.whole_number("interval_ms", 50),
        clock=clock,
        archive=url.options.get("archive"),
        file_bytes=url.whole_number("file_size", FILE_BYTES),
        accept_loss=url.is_on("accept_loss"),
        other_owner=url.is_on("other_owner"),
    )
