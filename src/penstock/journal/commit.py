"""Group commit: threads that wait for the disk at the same time share one sync.

The first waiter syncs in its own thread: a lone producer never waits for another thread. Waiters
that come during that sync sleep, each on a lock of its own. If the sync does not cover all of them,
a background thread takes over until there are none: it wakes those whose sequence is durable and
starts the next sync at once, so that the disk works while they do.
"""

import threading
from collections.abc import Callable
from typing import Final

from penstock.errors import JournalError

_ALL_SEQUENCES: Final = 1 << 62


class GroupCommit:
    """Calls `sync`, which returns the sequence that is durable then, for all waiters.

    With a period `sync_idle` is called that often while no sync is under way.
    """

    def __init__(
        self,
        sync: Callable[[], int],
        sync_idle: Callable[[], int] | None = None,
        period_s: float = 0,
    ) -> None:
        self._sync = sync
        self._sync_idle = sync_idle or sync
        self._period_s = period_s or None
        self._turn = threading.Lock()
        # Guarded by `_turn`: the waiters and what they wait for; whether a sync is under way or
        # about to start, and whether the background thread does it.
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        self._under_way = False
        self._by_thread = False
        self._closing = False
        # Held while the thread has nothing to do. A lock, because each sync for an event loop is
        # handed over, and a Condition takes several times as long.
        self._idle = threading.Lock()
        self._idle.acquire()
        self._is_called = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread at once, so that a refusal of the system is raised here."""
        self._thread = threading.Thread(
            target=self._keep_syncing, name="penstock-sync", daemon=True
        )
        self._thread.start()

    def wait(self, sequence: int) -> None:
        """Blocks until a sync has reached that sequence or failed, or `close` was called."""
        durable = _ALL_SEQUENCES
        is_ours = False
        # KeyboardInterrupt can be raised at any point: a thread that began a sync must wake the
        # others.
        try:
            with self._turn:
                if self._closing:
                    return
                woken = self._enqueue_waiter(sequence) if self._under_way else None
                if woken is None:
                    self._under_way = is_ours = True
            if woken is not None:
                woken.acquire()
                return
            durable = self._sync()
        finally:
            if is_ours:
                try:
                    self._wake(durable)
                except BaseException:
                    self._wake(_ALL_SEQUENCES)
                    raise

    def _enqueue_waiter(self, sequence: int) -> threading.Lock:
        """A lock that is held until that sequence is durable."""
        woken = threading.Lock()
        woken.acquire()
        self._waiting.append((sequence, woken.release))
        return woken

    def notify(self, sequence: int, done: Callable[[], object]) -> None:
        """Calls `done`, from any thread, when `wait` would have returned."""
        with self._turn:
            closing = self._closing
            if not closing:
                self._waiting.append((sequence, done))
                if not self._under_way:
                    self._under_way = True
                    self._hand_over()
        if closing:
            done()

    def close(self) -> None:
        """Ends the thread and wakes all waiters; from now on `wait` returns at once."""
        with self._turn:
            self._closing = True
            self._call_thread()
        if self._thread is not None:
            self._thread.join()
        self._wake(_ALL_SEQUENCES)

    def _wake(self, durable: int) -> None:
        """Wakes the waiters whose sequence is durable; for the others the thread syncs again.

        Waking one twice does no harm, so a thread that was interrupted here may call it again.
        """
        with self._turn:
            if self._closing:
                durable = _ALL_SEQUENCES
            later = []
            for each in self._waiting:
                if each[0] > durable:
                    later.append(each)
                    continue
                try:
                    each[1]()
                except Exception:
                    # A waiter whose event loop is closed raises; the others must still be woken.
                    continue
            self._waiting = later
            if later:
                self._hand_over()
            else:
                self._under_way = self._by_thread = False

    def _hand_over(self) -> None:
        if not self._by_thread:
            self._by_thread = True
            self._call_thread()

    def _call_thread(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._idle.release()

    def _keep_syncing(self) -> None:
        while (sync := self._take_turn()) is not None:
            durable = _ALL_SEQUENCES
            try:
                durable = sync()
            except Exception as error:
                # Every waiter is woken, syncs in its own thread and gets the error there.
                if isinstance(error, JournalError):
                    self._period_s = None  # a journal that failed stays failed
            self._wake(durable)

    def _take_turn(self) -> Callable[[], int] | None:
        """Waits until it is the thread's turn, or the period is over; returns what it is to call.

        Returns None at the end.
        """
        sync = self._sync
        while True:
            with self._turn:
                if self._closing:
                    return None
                if self._by_thread:
                    return sync
            was_called = self._idle.acquire(timeout=self._period_s or -1)
            with self._turn:
                if was_called:
                    self._is_called = False
                elif not self._under_way:
                    self._under_way = self._by_thread = True
                    sync = self._sync_idle
