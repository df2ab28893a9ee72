"""Group commit: many wait for the disk, one syncs for them all.

Whoever comes while nobody syncs does it itself, at once: a lone producer never waits for another
thread. Those who come meanwhile sleep, each on a lock of its own. If that sync does not serve all
of them, a thread takes over until nobody waits: it wakes those it has served and begins the next
sync in the same breath, so that the disk works while they do.
"""

import threading
from collections.abc import Callable
from typing import Final

from penstock.errors import JournalError

_EVERYTHING: Final = 1 << 62


class GroupCommit:
    """Calls `sync`, which returns the sequence that is durable then, for all who wait.

    With a period it is also called that often, whoever waits.
    """

    def __init__(self, sync: Callable[[], int], period_s: float = 0) -> None:
        self._sync = sync
        self._period_s = period_s or None
        self._turn = threading.Lock()
        # Guarded by `_turn`: who waits for what, and whether someone, or the thread, is to sync.
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        self._under_way = False
        self._by_thread = False
        self._handed_over = threading.Condition(self._turn)
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread: here and not when it is needed, which is too late to be refused."""
        self._thread = threading.Thread(
            target=self._keep_syncing, name="penstock-sync", daemon=True
        )
        self._thread.start()

    def wait(self, sequence: int) -> None:
        """Blocks until a sync has reached that sequence or failed, or the end has come."""
        durable = _EVERYTHING
        is_ours = False
        # An interrupt may come at any point: whoever has begun must let the others go on.
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
                    self._wake(_EVERYTHING)
                    raise

    def _enqueue_waiter(self, sequence: int) -> threading.Lock:
        """A lock that is taken, and let go when that sequence is durable."""
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
        """Ends the thread and wakes all who wait; nobody waits from now on."""
        with self._turn:
            self._closing = True
            self._handed_over.notify()
        if self._thread is not None:
            self._thread.join()
        self._wake(_EVERYTHING)

    def _wake(self, durable: int) -> None:
        """Wakes those whose sequence is durable; for the others the thread goes on.

        To wake somebody twice does no harm, so whoever was interrupted here may begin again.
        """
        with self._turn:
            if self._closing:
                durable = _EVERYTHING
            later = []
            for each in self._waiting:
                if each[0] > durable:
                    later.append(each)
                    continue
                try:
                    each[1]()
                except Exception:
                    # One who cannot be told, its event loop being gone, keeps nobody from it.
                    continue
            self._waiting = later
            if later:
                self._hand_over()
            else:
                self._under_way = self._by_thread = False

    def _hand_over(self) -> None:
        self._by_thread = True
        self._handed_over.notify()

    def _keep_syncing(self) -> None:
        while self._take_turn():
            durable = _EVERYTHING
            try:
                durable = self._sync()
            except Exception as error:
                # Everyone who waits is woken, and finds out.
                if isinstance(error, JournalError):
                    self._period_s = None  # it will not get better
            self._wake(durable)

    def _take_turn(self) -> bool:
        """Waits until it is the thread's turn, or the period is over; False at the end."""
        with self._turn:
            while not self._by_thread and not self._closing:
                asked = self._handed_over.wait(self._period_s)
                if not asked and not self._under_way:
                    self._under_way = self._by_thread = True
            return not self._closing
