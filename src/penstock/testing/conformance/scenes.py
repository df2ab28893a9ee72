"""What stands before each command of the fault suite, and what its outcome means for the ledger.

A script makes messages, yields the command, and gets its reply or the error it ended with. `Scene`
has the queues of one round and the ledger of their messages.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

import pytest

from penstock.errors import QueueNotFound, StaleReceipt
from penstock.service import (
    Batch,
    Claim,
    Command,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Extend,
    Pull,
    Purge,
    Push,
    PushMany,
    Redrive,
    Release,
    Stats,
)
from penstock.testing.conformance.seam import POLL_S_MAX

# How long the suite waits for anything before it fails.
TIMEOUT_S: Final = 20.0
WAIT_MS: Final = 2_000
MANY: Final = 25


class Scene:
    """The queues of one round and the ledger of their messages.

    `here` must be found in the end, `perhaps` may be, `gone` must not be; `twice` may be found more
    than once.
    """

    def __init__(self, execute: Callable[[Command[Any]], Any], visibility_ms: int) -> None:
        self.execute = execute
        self.visibility_ms = visibility_ms
        name = f"faults-{next(_numbers)}-{time.monotonic_ns() % 10**9}"
        self.queue, self.dead, self.other = name, f"{name}-dead", f"{name}-other"
        self.here: set[bytes] = set()
        self.perhaps: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.twice: set[bytes] = set()
        # Whether claims of the command are released when it is cancelled.
        self.is_pull = False
        self.create(self.queue)

    def create(self, queue: str, **settings: Any) -> None:
        """Makes a queue."""
        self.execute(CreateQueue(queue, {"visibility_ms": self.visibility_ms, **settings}))

    def bodies(self, number: int) -> list[bytes]:
        """So many new bodies."""
        return [f"{self.queue} {n}".encode() for n in range(number)]

    def push(self, number: int = MANY) -> list[bytes]:
        """Pushes so many messages, which must be there from now on."""
        bodies = self.bodies(number)
        self.pushed(bodies, self.execute(PushMany(self.queue, bodies)))
        assert self.here == set(bodies)
        return bodies

    def pushed(self, bodies: Iterable[bytes], outcome: Any) -> None:
        """Notes the outcome of pushes: the replies, or an error of all of them."""
        for body, reply in zip(bodies, _each(outcome), strict=False):
            (self.perhaps if isinstance(reply, BaseException) else self.here).add(body)

    def claims(self, number: int = MANY) -> list[Claim]:
        """Claims of so many messages that were pushed before."""
        self.push(number)
        found: list[Claim] = self.execute(Pull(self.queue, number, self.visibility_ms))
        assert len(found) == number
        return found

    def deleted(self, claims: Sequence[Claim], outcome: Any) -> None:
        """Notes the outcome of deletes: the replies, or an error of all of them."""
        for claim, reply in zip(claims, _each(outcome), strict=False):
            if isinstance(reply, StaleReceipt):
                continue
            self.here.discard(claim.body)
            unknown = isinstance(reply, BaseException)
            (self.perhaps if unknown else self.gone).add(claim.body)

    def delete(self, claims: Sequence[Claim]) -> None:
        """Deletes what a command has pulled."""
        if claims:
            deletes = Batch([Delete(claim.queue, claim.proof) for claim in claims])
            self.deleted(claims, self.execute(deletes))

    def unknown(self) -> None:
        """Notes that every message may be there or not."""
        self.perhaps |= self.here
        self.here.clear()

    def dead_letters(self, number: int) -> None:
        """Makes so many dead letters."""
        self.execute(ConfigureQueue(self.queue, {"dead_letter": self.dead, "max_receives": 1}))
        claims = self.claims(number)
        self.execute(Batch([Release(claim.queue, claim.proof) for claim in claims]))
        until(lambda: not self.execute(Pull(self.queue, 1)) and self._visible_dead() == number)

    def _visible_dead(self) -> int:
        return int(self.execute(Stats(self.dead)).visible)


_numbers = count()
Script = Generator[Command[Any], Any, None]


def _each(outcome: Any) -> Any:
    """The outcomes of several items, endless if there is one for all of them."""
    if isinstance(outcome, BaseException):
        return (outcome for _ in count())
    return outcome


def until(holds: Callable[[], bool], why: Callable[[], str] = str) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < give_up, f"not in time: {why()}"
        time.sleep(POLL_S_MAX / 10)


# One function for each command: what is there before it, the command, and what its outcome means.


def _push(scene: Scene) -> Script:
    scene.push(3)
    body = b"the fourth"
    scene.pushed([body], _one((yield Push(scene.queue, body))))


def _push_many(scene: Scene) -> Script:
    bodies = scene.bodies(MANY)
    scene.pushed(bodies, (yield PushMany(scene.queue, bodies)))


def _pull(scene: Scene) -> Script:
    scene.push(3)
    scene.is_pull = True
    outcome = yield Pull(scene.queue, 1, scene.visibility_ms)
    if isinstance(outcome, list):
        scene.delete(outcome)


def _pull_many(scene: Scene) -> Script:
    scene.push()
    scene.is_pull = True
    outcome = yield Pull(scene.queue, 4 * MANY, scene.visibility_ms)
    if isinstance(outcome, list):
        scene.delete(outcome)


def _pull_waiting(scene: Scene) -> Script:
    scene.push(3)
    scene.is_pull = True
    outcome = yield Pull(scene.queue, 9, scene.visibility_ms, wait_ms=WAIT_MS)
    if isinstance(outcome, list):
        scene.delete(outcome)


def _delete(scene: Scene) -> Script:
    (claim,) = scene.claims(1)
    scene.deleted([claim], _one((yield Delete(claim.queue, claim.proof))))


def _delete_many(scene: Scene) -> Script:
    claims = scene.claims()
    scene.deleted(claims, (yield Batch([Delete(each.queue, each.proof) for each in claims])))


def _extend(scene: Scene) -> Script:
    (claim,) = scene.claims(1)
    yield Extend(claim.queue, claim.proof, scene.visibility_ms)


def _release(scene: Scene) -> Script:
    (claim,) = scene.claims(1)
    yield Release(claim.queue, claim.proof)


def _batch(scene: Scene) -> Script:
    """Pushes, deletes, extensions and releases in one command."""
    claims = scene.claims(12)
    new = [b"new %d" % n for n in range(4)]
    items: list[Any] = []
    for number, body in enumerate(new):
        delete, extend, release = claims[3 * number : 3 * number + 3]
        items += [
            Push(scene.queue, body),
            Delete(delete.queue, delete.proof),
            Extend(extend.queue, extend.proof, scene.visibility_ms),
            Release(release.queue, release.proof),
        ]
    outcome = yield Batch(items)
    parts = list(outcome) if isinstance(outcome, list) else [outcome] * len(items)
    scene.pushed(new, parts[::4])
    scene.deleted(claims[::3], parts[1::4])


def _dead_letter(scene: Scene) -> Script:
    """A pull that moves messages to the dead-letter queue."""
    scene.execute(ConfigureQueue(scene.queue, {"dead_letter": scene.dead, "max_receives": 1}))
    claims = scene.claims(3)
    releases = [Release(claim.queue, claim.proof) for claim in claims[:2]]
    scene.execute(Batch([*releases]))
    scene.twice |= scene.here
    scene.is_pull = True
    outcome = yield Pull(scene.queue, 9, scene.visibility_ms)
    if isinstance(outcome, list):
        with suppress(StaleReceipt):
            scene.execute(Release(claims[2].queue, claims[2].proof))


def _redrive(scene: Scene) -> Script:
    scene.dead_letters(12)
    scene.twice |= scene.here
    yield Redrive(scene.dead, None, 250)


def _redrive_some(scene: Scene) -> Script:
    scene.dead_letters(12)
    scene.create(scene.other)
    scene.twice |= scene.here
    yield Redrive(scene.dead, scene.other, 11)


def _purge(scene: Scene) -> Script:
    scene.claims(5)
    if isinstance((yield Purge(scene.queue)), BaseException):
        scene.unknown()
    else:
        scene.gone |= scene.here
        scene.here.clear()


def _remove(scene: Scene) -> Script:
    scene.dead_letters(3)
    kept = set(scene.here)
    scene.execute(Push(scene.queue, b"removed"))
    outcome = yield DeleteQueue(scene.queue)
    if isinstance(outcome, BaseException):
        scene.perhaps.add(b"removed")
        with suppress(QueueNotFound):
            scene.execute(DeleteQueue(scene.queue))
    scene.perhaps.discard(b"removed")
    scene.gone.add(b"removed")
    with pytest.raises(QueueNotFound):
        scene.execute(DescribeQueue(scene.queue))
    scene.create(scene.queue)
    assert scene.here == kept


def _configure(scene: Scene) -> Script:
    """Also makes the dead-letter queue that is missing."""
    scene.push(3)
    asked = {"visibility_ms": 2 * scene.visibility_ms, "dead_letter": scene.dead, "max_receives": 9}
    outcome = yield ConfigureQueue(scene.queue, asked)
    if isinstance(outcome, BaseException):
        outcome = scene.execute(ConfigureQueue(scene.queue, asked))
    assert outcome.settings.visibility_ms == 2 * scene.visibility_ms
    assert scene.execute(DescribeQueue(scene.dead)).queue == scene.dead


def _create(scene: Scene) -> Script:
    """Also makes the dead-letter queue that is missing."""
    asked = {"visibility_ms": scene.visibility_ms, "dead_letter": scene.dead, "max_receives": 9}
    command = CreateQueue(scene.other, asked)
    if isinstance((yield command), BaseException):
        scene.execute(command)
    assert scene.execute(DescribeQueue(scene.other)).settings.dead_letter == scene.dead
    assert scene.execute(DescribeQueue(scene.dead)).queue == scene.dead


def _one(outcome: Any) -> Any:
    return outcome if isinstance(outcome, BaseException) else [outcome]


SCRIPTS: Final[dict[str, Callable[[Scene], Script]]] = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        *(_push, _push_many, _pull, _pull_many, _pull_waiting, _delete, _delete_many, _extend),
        *(_release, _batch, _dead_letter, _redrive, _redrive_some, _purge, _remove, _configure),
        _create,
    )
}
