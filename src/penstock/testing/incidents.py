"""Gives a consumer what a queue gave it in an incident: the same messages, in the same order."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from penstock.journal.slices import (
    CLAIMED,
    DELETED,
    EXTENDED,
    PUSHED,
    RELEASED,
    Slice,
    SliceStep,
    read_slice,
)
from penstock.service import Claim, PullIds
from penstock.testing.places import TestQueues, in_process


class Reproduced(NamedTuple):
    """What came of it: how often the consumer was called, and the errors that it raised."""

    deliveries: int
    errors: list[Exception]


def reproduce(cut: Slice | str | os.PathLike[str], work: Callable[[Claim], object]) -> Reproduced:
    """Calls `work` for each delivery of a slice, in its order and at its times, on a manual clock.

    Each claim ends as it did then, whatever `work` does: deleted, released, or run out, so that
    what was delivered twice is delivered twice. An AssertionError of `work` ends it. Raises
    InvalidField for a file that is no slice.
    """
    if not isinstance(cut, Slice):
        cut = read_slice(Path(cut).read_bytes())
    with in_process() as queues:
        queues.create(cut.header.queue, fifo=cut.header.fifo)
        run = _Reproduction(queues, cut, work)
        for step in cut.steps:
            run.do(step)
        return Reproduced(run.deliveries, run.errors)


class _Reproduction:
    """The state of a slice that is run: the ids and the claims of its messages."""

    def __init__(self, queues: TestQueues, cut: Slice, work: Callable[[Claim], object]) -> None:
        self.deliveries = 0
        self.errors: list[Exception] = []
        self._queues = queues
        self._queue = cut.header.queue
        self._work = work
        self._began = queues.now
        self._ids: dict[int, str] = {}
        self._claims: dict[int, Claim] = {}

    def do(self, step: SliceStep) -> None:
        """Does one step, when its time has come."""
        due = self._began + timedelta(milliseconds=step.after_ms)
        self._queues.advance(max(timedelta(), due - self._queues.now))
        seconds = step.for_ms / 1_000
        claim = self._claims.get(step.message)
        if step.event == PUSHED:
            self._push(step, seconds)
        elif step.event == CLAIMED:
            self._claim(step)
        elif claim is None:
            return
        elif step.event == EXTENDED:
            self._queues.extend(claim, seconds)
        elif step.event == RELEASED:
            self._queues.release(claim, delay=seconds)
        elif step.event == DELETED:
            self._queues.delete(claim)

    def _push(self, step: SliceStep, delay: float) -> None:
        self._ids[step.message] = self._queues.push(
            self._queue,
            step.content,
            delay=delay,
            priority=step.priority,
            # Each push of a slice made a message then.
            dedup_id=f"{step.message}",
            group=step.group,
            attributes=step.all_attributes,
        ).id

    def _claim(self, step: SliceStep) -> None:
        asked = PullIds(self._queue, [self._ids[step.message]], visibility_ms=step.for_ms)
        claims = self._queues.service.execute(asked)
        if not claims:
            # In the slice its claim ended in the same millisecond, after this one.
            return
        self._claims[step.message] = claims[0]
        self.deliveries += 1
        try:
            self._work(claims[0])
        except AssertionError:
            raise
        except Exception as error:
            self.errors.append(error)
