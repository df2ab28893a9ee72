"""The engine for callers that may block: one lock for the engine, one wait for the disk."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, TypeVar, cast

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.waiting import Waiter
from penstock.errors import InFlightLimit
from penstock.forked import start_over_when_forked
from penstock.service import REDRIVE_MAX, Command, Pull

R = TypeVar("R")


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
        self._unsubscribe = engine.clock.subscribe(self._on_time_moved)
        if engine.upkeep is not None:
            engine.upkeep.start(self._exclusively)
        start_over_when_forked(self)

    def start_over(self) -> None:
        """Makes a new lock: in the child of a fork, no thread is left to release the old one."""
        self._lock = threading.Lock()
        self._taking = iter(self._lock.acquire, False)
        self._release = self._lock.release

    def _exclusively(self, step: Callable[[], object]) -> object:
        with self._lock:
            return step()

    def execute(self, command: Command[R]) -> R:
        """Executes the command, and returns once its changes are durable."""
        # `with` costs as much as the lock itself. After a plain call of acquire, an interrupt may
        # come before `try` is reached, and the lock would never be released; between an iterator
        # and the body of its loop no interrupt can come.
        for _ in self._taking:
            try:
                reply = self._submit(command)
                sequence = 0 if self._answers_at_once else self._engine.answer_sequence
                break
            except InFlightLimit:
                if type(command) is not Pull or not self._engine.wait_ms(command):
                    raise
                reply = cast(R, [])
                break
            finally:
                self._release()
        if not reply and type(command) is Pull:
            return cast(R, self._wait_for_message(command))
        if sequence and sequence > self._journal.durable_sequence:
            self._journal.wait(sequence)
        return reply

    def _wait_for_message(self, command: Pull) -> list[Any]:
        signal = threading.Event()
        with self._lock:
            if not self._engine.wait_ms(command):
                return []
            # A message may have come since the lock was released: try again before waiting.
            claims: list[Any] = []
            with suppress(InFlightLimit):
                claims = self._engine.submit(command)
            sequence = self._engine.answer_sequence
            waiter = None if claims else self._engine.wait(command, signal.set)
        if waiter is not None:
            try:
                self._wait_for_answer(waiter, signal)
            except BaseException:
                with self._lock:
                    self._engine.cancel_wait(waiter)
                raise
            if waiter.error is not None:
                raise waiter.error
            claims, sequence = waiter.claims, waiter.sequence
        if claims and sequence > self._journal.durable_sequence:
            self._journal.wait(sequence)
        return claims

    def _wait_for_answer(self, waiter: Waiter, signal: threading.Event) -> None:
        while not waiter.done:
            with self._lock:
                wake_ms = self._engine.next_wake_ms
            # Without the lock: if this call moves a manual clock, `_on_time_moved` acquires it.
            clock = self._engine.clock
            signal.wait(clock.waiter_timeout_s(wake_ms, blocks_thread=True))
            signal.clear()
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
