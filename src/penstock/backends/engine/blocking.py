"""The engine for callers that may block: one lock for the engine, one wait for the disk."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.waiting import Waiter
from penstock.errors import InFlightLimit
from penstock.forked import start_over_when_forked
from penstock.service import REDRIVE_MAX, Command, Pull

R = TypeVar("R")


def _wake(signal: threading.Lock) -> None:
    with suppress(RuntimeError):
        # It is released already if its thread has been woken before and has not run since.
        signal.release()


class BlockingEngine:
    """A `QueueService` over an engine in this process, safe for many threads."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max: int = REDRIVE_MAX

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._submit = engine.submit
        self._journal = engine.journal
        self.start_over()
        self._answers_at_once = engine.journal.keeps_nothing
        # The waiter whose thread calls `tick` in time, if something becomes due earlier than the
        # threads knew when they began to wait.
        self._timekeeper: Waiter | None = None
        engine.arrange_ticks(self._wake_timekeeper)
        self._unsubscribe = engine.clock.subscribe(self._on_time_moved)
        if engine.upkeep is not None:
            engine.upkeep.start(self.exclusively)
        start_over_when_forked(self)

    def start_over(self) -> None:
        """Makes a new lock: in the child of a fork, no thread is left to release the old one."""
        self._lock = threading.Lock()
        self._taking = iter(self._lock.acquire, False)
        self._release = self._lock.release

    def exclusively(self, step: Callable[[], R]) -> R:
        """What the step returns, which no other thread's command interrupts."""
        with self._lock:
            return step()

    def execute(self, command: Command[R]) -> R:
        """Executes the command, and returns once its changes are durable."""
        # `with` costs as much as the lock itself. After a plain call of acquire, an interrupt may
        # come before `try` is reached, and the lock would never be released; between an iterator
        # and the body of its loop no interrupt can come.
        reply: Any = None
        try:
            for _ in self._taking:
                try:
                    reply = self._submit(command)
                    sequence = 0 if self._answers_at_once else self._engine.answer_sequence
                    break
                except InFlightLimit:
                    if type(command) is not Pull or not self._engine.wait_ms(command):
                        raise
                    reply = []
                    break
                finally:
                    self._release()
            if not reply and type(command) is Pull:
                return self._wait_for_message(command)  # type: ignore[return-value]
            if sequence and sequence > self._journal.durable_sequence:
                self._journal.wait(sequence)
        except BaseException:
            if reply:
                self._release_unseen(command, reply)
            raise
        return reply  # type: ignore[no-any-return]

    def _release_unseen(self, command: Command[Any], claims: Any) -> None:
        with self._lock:
            self._engine.release_unseen(command, claims)

    def _wait_for_message(self, command: Pull) -> list[Any]:
        # A lock that `wake` releases: an interrupt may leave the lock of a threading.Event taken.
        signal = threading.Lock()
        signal.acquire()
        waiter: Waiter | None = None
        claims: list[Any] = []
        try:
            with self._lock:
                if not self._engine.wait_ms(command):
                    return []
                # A message may have come since the lock was released: try again before waiting.
                with suppress(InFlightLimit):
                    claims = self._engine.submit(command)
                sequence = self._engine.answer_sequence
                waiter = None if claims else self._engine.wait(command, partial(_wake, signal))
            if waiter is not None:
                self._wait_for_answer(waiter, signal)
                if self._timekeeper is waiter:
                    with self._lock:
                        self._hand_over(waiter)
                if waiter.error is not None:
                    raise waiter.error
                claims, sequence = waiter.claims, waiter.sequence
            if claims and sequence > self._journal.durable_sequence:
                self._journal.wait(sequence)
        except BaseException:
            # Most likely an interrupt: nobody would have the claims, or those made from now on.
            with self._lock:
                if waiter is None:
                    self._engine.release_unseen(command, claims)
                else:
                    self._engine.cancel_wait(waiter)
                    self._hand_over(waiter)
            raise
        return claims

    def _wake_timekeeper(self) -> None:
        if self._timekeeper is None or self._timekeeper.done:
            self._timekeeper = self._engine.first_waiter
        if self._timekeeper is not None:
            self._timekeeper.wake()

    def _hand_over(self, waiter: Waiter) -> None:
        """Ends a waiter's part as the timekeeper; another one is."""
        if self._timekeeper is waiter:
            self._timekeeper = None
            self._wake_timekeeper()

    def _wait_for_answer(self, waiter: Waiter, signal: threading.Lock) -> None:
        while not waiter.done:
            with self._lock:
                wake_ms = self._engine.next_wake_ms
            # Without the lock: if this call moves a manual clock, `_on_time_moved` acquires it.
            clock = self._engine.clock
            timeout_s = clock.waiter_timeout_s(wake_ms, blocks_thread=True)
            signal.acquire(timeout=-1 if timeout_s is None else timeout_s)
            if not waiter.done:
                with self._lock:
                    self._engine.tick()

    def _on_time_moved(self) -> None:
        with self._lock:
            self._engine.catch_up()

    def close(self) -> None:
        """Ends all waits, makes everything durable, and closes the journal."""
        self._unsubscribe()
        if self._engine.upkeep is not None:
            self._engine.upkeep.stop()
        with self._lock:
            self._engine.close()
