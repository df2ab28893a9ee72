"""The queues for SQS actions: found by URL, ARN or name, described by a `QueueInfo`.

An action is a generator: it yields commands and is sent their replies, so the same code works with
an engine in this process and with a remote service (`backends.loop`). A PenstockError that an
action does not catch becomes the refusal of `refusal_of`.
"""

from base64 import urlsafe_b64decode
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.backends.loop import LoopService, Steps
from penstock.errors import (
    BackendLost,
    InFlightLimit,
    InvalidReceipt,
    JournalError,
    MessageTooLarge,
    PenstockError,
    QueueExists,
    QueueNotFound,
    UnavailableError,
    UnsupportedOperation,
)
from penstock.service import ConfigureQueue, DescribeQueue, DescribeQueues, QueueInfo
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

# The annotation that keeps the home of a queue with a bare name.
HOME_NOTE: Final = ".home"
_KNOWN_URLS_MAX: Final = 10_000
# The longest name or ARN, encoded, with room to spare: no token of ours is longer.
_OPAQUE_CHARS_MAX: Final = 1_024
# How many queues are read by one command. A queue's annotations take up to 64 KiB, and a page from
# a remote service is one frame.
_PAGE: Final = 500


class Caller(NamedTuple):
    """The sender of a request, and the address by which it reaches this server.

    A caller that is confined has a key of this server, and can reach only the queues of its own
    account. `trace` is the X-Ray header of the request. `holder` names the sender in the journal.
    """

    owner: Owner
    suffix: str
    base_url: str
    confined: bool
    holder: str
    trace: str | None = None

    def may_reach(self, owner: Owner) -> bool:
        """Whether this caller may use an owner's queues.

        Policies are stored and not enforced. Without keys any caller can claim to be any account,
        so accounts are not separated; regions are.
        """
        return owner == self.owner or (owner.region == self.owner.region and not self.confined)


# How many queues whose names begin alike are looked at for a hint.
_ELSEWHERE_MAX: Final = 20


class Windows(NamedTuple):
    """How long a deleted queue's name cannot be used, and how long a purge refuses the next."""

    deleted_ms: int = 60_000
    purged_ms: int = 60_000


class QueueLookup:
    """The queues of one service by URL, ARN and name."""

    def __init__(
        self,
        service: LoopService,
        directory: QueueDirectory,
        windows: Windows,
        has_notes: bool = True,
        strict_receipts: bool = False,
    ) -> None:
        """Without `has_notes` no queue is given the note of its home: see `home`."""
        self.service = service
        self.strict_receipts = strict_receipts
        self.directory = directory
        home = dict(zip(("account", "region"), directory.default, strict=True))
        self.home_note = {HOME_NOTE: msgspec.json.encode(home).decode()} if has_notes else {}
        self.windows = windows
        self.now_ms = service.now_ms
        self._view = service.view
        self._names_by_url: dict[tuple[str, str], str] = {}
        # In memory only: a restart ends the window early.
        self.deleted_at_ms: dict[str, int] = {}

    def known(self, url: str, caller: Caller) -> QueueInfo | None:
        """The queue of a URL for this caller, if that needs no command: see `locate`."""
        try:
            return self._view(self._names_by_url[url, caller.suffix])
        except KeyError:
            return None

    def locate(self, url: str, caller: Caller) -> Steps[QueueInfo]:
        """The queue of a URL for this caller. Raises Refusal."""
        name = self._name(url, caller)
        queue = self._view(name)
        if queue is None:
            queue = yield from self._existing(name, caller)
        return queue

    def describe(self, url: str, caller: Caller) -> Steps[QueueInfo]:
        """The same, as it is now: for actions that show or change settings. Raises Refusal."""
        return (yield from self._existing(self._name(url, caller), caller))

    def _existing(self, name: str, caller: Caller) -> Steps[QueueInfo]:
        """The queue of an internal name. Raises Refusal, with other queues of its name."""
        queue = yield from self.find_internal(name)
        if queue is None:
            owner, shown = self.directory.address(name)
            raise no_such_queue(owner, (yield from self.elsewhere(caller, shown)))
        return queue

    def _describe(self, name: str) -> Steps[QueueInfo]:
        queue: QueueInfo = yield DescribeQueue(name)
        return queue

    def _name(self, url: str, caller: Caller) -> str:
        """The internal name of the queue of a URL for this caller. Raises Refusal."""
        try:
            return self._names_by_url[url, caller.suffix]
        except KeyError:
            pass
        address = read_url(url)
        if address is None:
            raise Refusal(
                faults.INVALID_ADDRESS, f"The address {url} is not valid for this endpoint."
            )
        account, name = address
        owner = Owner(account or caller.owner.account, caller.owner.region)
        if not caller.may_reach(owner):
            raise no_such_queue()
        internal = self.directory.internal_name(QueueAddress(owner, name))
        if len(self._names_by_url) >= _KNOWN_URLS_MAX:
            self._names_by_url.clear()
        self._names_by_url[url, caller.suffix] = internal
        return internal

    def find(self, owner: Owner, name: str) -> Steps[QueueInfo | None]:
        """An owner's queue of this name, if there is one."""
        if not (is_standard_name(name) or is_fifo_name(name)):
            # A name with an @ would be the internal name of another owner's queue.
            return None
        return (
            yield from self.find_internal(self.directory.internal_name(QueueAddress(owner, name)))
        )

    def find_internal(self, internal: str) -> Steps[QueueInfo | None]:
        """The queue of this internal name, if there is one."""
        try:
            return (yield from self._describe(internal))
        except QueueNotFound:
            return None

    def elsewhere(self, caller: Caller, name: str) -> Steps[list[Owner]]:
        """The owners of queues of this name that the caller may know of, some of them."""
        # The queues behind sqs:// have no other owners.
        if not self.home_note or not (is_standard_name(name) or is_fifo_name(name)):
            return []
        found: list[QueueInfo] = yield DescribeQueues(name, "", _ELSEWHERE_MAX)
        addresses = [self.directory.address(each.queue) for each in found]
        return [
            owner
            for owner, other in addresses
            if other == name and not (caller.confined and owner.account != caller.owner.account)
        ]

    def select(self, is_wanted: Callable[[QueueInfo], bool]) -> Steps[list[QueueInfo]]:
        """The queues that are wanted, in order of name; each as it was when its page was read."""
        wanted: list[QueueInfo] = []
        after = ""
        while True:
            page: list[QueueInfo] = yield DescribeQueues("", after, _PAGE)
            wanted += filter(is_wanted, page)
            if len(page) < _PAGE:
                return wanted
            after = page[-1].queue
            yield None

    def sources_of(self, internal: str) -> Steps[list[QueueInfo]]:
        """The queues that name this one as their dead-letter queue, in order of name."""
        return (yield from self.select(lambda queue: self.is_source(queue, internal)))

    def is_source(self, queue: QueueInfo, internal: str) -> bool:
        """Whether a queue's redrive policy, in effect or withheld, names this dead-letter queue."""
        target = self.directory.address(internal)
        dead = queue.settings.dead_letter
        if dead is not None:
            return self.directory.address(dead) == target
        policy = queue.settings.annotations.get(WITHHELD)
        return policy is not None and target_of(policy) == target

    def note(self, name: str, key: str, text: str) -> Steps[None]:
        """Stores a text of this endpoint in a queue's annotations."""
        queue = yield from self._describe(name)
        annotations = {**queue.settings.annotations, key: text}
        yield ConfigureQueue(name, {"annotations": annotations})

    def url(self, caller: Caller, internal: str) -> str:
        """The URL by which this caller reaches a queue."""
        address = self.directory.address(internal)
        return f"{caller.base_url}/{address.owner.account}/{address.name}"

    def arn(self, internal: str) -> str:
        """The ARN of a queue."""
        return self.directory.arn(internal)


def decode_opaque(text: str) -> bytes:
    """The decoded content of a token of a page or of a task. Raises ValueError."""
    if len(text) > _OPAQUE_CHARS_MAX:
        raise ValueError("longer than any token of this server")
    return urlsafe_b64decode(text.encode("ascii"))


def no_such_queue(owner: Owner | None = None, elsewhere: Sequence[Owner] = ()) -> Refusal:
    """The refusal of a queue that does not exist, or is not the caller's.

    `owner` is where it was looked for, and `elsewhere` has the owners of others of its name.
    """
    text = "The specified queue does not exist."
    if owner is not None and elsewhere:
        places = ", ".join(f"{each.region} of account {each.account}" for each in elsewhere)
        text += f" It was looked for in {owner.region} of account {owner.account}"
        text += f", and exists in {places}."
    return Refusal(faults.QUEUE_DOES_NOT_EXIST, text)


def refusal_of(error: PenstockError) -> Refusal:
    """The SQS error for an error of the queue service."""
    match error:
        case QueueNotFound():
            return no_such_queue()
        case QueueExists():
            return Refusal(faults.QUEUE_NAME_EXISTS, str(error))
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
        case BackendLost():
            return Refusal(faults.SERVICE_UNAVAILABLE, str(error))
        case UnavailableError():
            return Refusal(faults.REQUEST_THROTTLED, str(error))
        case JournalError():
            return Refusal(faults.SERVICE_UNAVAILABLE, "The store cannot be written.")
    return Refusal(faults.INVALID_PARAMETER_VALUE, str(error))


def annotated(queue: QueueInfo, name: str, text: str | None) -> ConfigureQueue:
    """The command that sets one annotation of a queue, or with None removes it."""
    annotations = {key: value for key, value in queue.settings.annotations.items() if key != name}
    if text is not None:
        annotations[name] = text
    return ConfigureQueue(queue.queue, {"annotations": annotations})
