"""The engine as the SQS actions see it: whose queue a URL means, what its refusals are called."""

from typing import Final, NamedTuple, TypeVar

from penstock.backends.engine.engine import Engine
from penstock.core.queue import QueueState
from penstock.errors import (
    InFlightLimit,
    InvalidReceipt,
    JournalError,
    MessageTooLarge,
    PenstockError,
    QueueNotFound,
    UnavailableError,
    UnsupportedOperation,
)
from penstock.service import Command, ConfigureQueue
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.address import (
    Owner,
    QueueAddress,
    QueueDirectory,
    is_fifo_name,
    is_standard_name,
    read_url,
)
from penstock.wire.sqs.attributes import WITHHELD, target_of
from penstock.wire.sqs.errors import Refusal

R = TypeVar("R")
_KNOWN_URLS_MAX: Final = 10_000


class Caller(NamedTuple):
    """Who asks, and by which address they reach us.

    A caller that is confined holds a key of this server, and reaches the queues of its own account
    alone. `trace` is the X-Ray header that came with the request.
    """

    owner: Owner
    suffix: str
    base_url: str
    confined: bool = False
    trace: str | None = None

    def may_reach(self, owner: Owner) -> bool:
        """Whether this caller may use an owner's queues.

        Policies are not heeded. Without keys anybody may say to be anybody, so nobody is kept out;
        but a region is never left.
        """
        return owner == self.owner or (owner.region == self.owner.region and not self.confined)


class Windows(NamedTuple):
    """How long a deleted queue's name stays taken, and how long a purge keeps the next one off."""

    deleted_ms: int = 60_000
    purged_ms: int = 60_000


class Store:
    """An engine's queues by URL, ARN and name."""

    def __init__(self, engine: Engine, directory: QueueDirectory, windows: Windows) -> None:
        self.engine = engine
        self.directory = directory
        self.windows = windows
        self.names = engine.shard.names
        self._submit = engine.submit
        self._by_url: dict[tuple[str, str], str] = {}
        # Kept in memory only: a restart ends this window early.
        self.deleted_at_ms: dict[str, int] = {}

    def submit(self, command: Command[R]) -> R:
        """Runs a command. Raises Refusal."""
        try:
            return self._submit(command)
        except PenstockError as error:
            raise refusal_of(error) from None

    def locate(self, url: str, caller: Caller) -> QueueState:
        """The queue a URL means to this caller. Raises Refusal."""
        try:
            return self.names[self._by_url[url, caller.suffix]]
        except KeyError:
            pass
        found = read_url(url)
        if found is None:
            raise Refusal(
                faults.INVALID_ADDRESS, f"The address {url} is not valid for this endpoint."
            )
        account, name = found
        owner = Owner(account or caller.owner.account, caller.owner.region)
        if not caller.may_reach(owner):
            raise no_such_queue()
        inside = self.directory.inside(QueueAddress(owner, name))
        queue = self.names.get(inside)
        if queue is None:
            raise no_such_queue()
        if len(self._by_url) >= _KNOWN_URLS_MAX:
            self._by_url.clear()
        self._by_url[url, caller.suffix] = inside
        return queue

    def find(self, owner: Owner, name: str) -> QueueState | None:
        """An owner's queue of this name, if there is one."""
        if not (is_standard_name(name) or is_fifo_name(name)):
            # What looks like the name inside of another's queue is none of this owner's.
            return None
        return self.names.get(self.directory.inside(QueueAddress(owner, name)))

    def url(self, caller: Caller, inside: str) -> str:
        """The URL by which this caller reaches a queue."""
        address = self.directory.address(inside)
        return f"{caller.base_url}/{address.owner.account}/{address.name}"

    def arn(self, inside: str) -> str:
        """The ARN of a queue."""
        return self.directory.arn(inside)

    def note(self, queue: QueueState, name: str, text: str) -> None:
        """Keeps a word with a queue, for this endpoint alone. Raises Refusal."""
        annotations = {**queue.settings.annotations, name: text}
        self.submit(ConfigureQueue(queue.name, {"annotations": annotations}))

    def sources_of(self, inside: str) -> list[str]:
        """The queues that name this one as their dead-letter queue, in order of name."""
        meant = self.directory.address(inside)
        return sorted(queue.name for queue in self.names.values() if self._names(queue, meant))

    def _names(self, queue: QueueState, meant: QueueAddress) -> bool:
        """Whether a queue's redrive policy, heeded or not, names this dead-letter queue."""
        dead = queue.settings.dead_letter
        if dead is not None:
            return self.directory.address(dead) == meant
        policy = queue.settings.annotations.get(WITHHELD)
        return policy is not None and target_of(policy) == meant

    def now_ms(self) -> int:
        """The engine's time."""
        return self.engine.clock.now_ms()


def no_such_queue() -> Refusal:
    """The refusal of a queue that is not there, or not the caller's."""
    return Refusal(faults.QUEUE_DOES_NOT_EXIST, "The specified queue does not exist.")


def refusal_of(error: PenstockError) -> Refusal:
    """What SQS calls an error of the engine."""
    match error:
        case QueueNotFound():
            return no_such_queue()
        case MessageTooLarge():
            return Refusal(
                faults.INVALID_PARAMETER_VALUE,
                f"One or more parameters are invalid. Reason: {error}",
            )
        case InvalidReceipt():
            return Refusal(faults.RECEIPT_IS_INVALID, "The input receipt handle is invalid.")
        case InFlightLimit():
            return Refusal(faults.OVER_LIMIT, "Too many messages in flight.")
        case UnsupportedOperation():
            return Refusal(faults.UNSUPPORTED_OPERATION, str(error))
        case UnavailableError():
            return Refusal(faults.REQUEST_THROTTLED, str(error))
        case JournalError():
            return Refusal(faults.SERVICE_UNAVAILABLE, "The store cannot be written.")
    return Refusal(faults.INVALID_PARAMETER_VALUE, str(error))
