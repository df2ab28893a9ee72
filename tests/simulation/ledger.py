"""The answers that all clients got, checked against the slots that are kept in the log (`truth`).

Each answer is checked when it arrives:

- a push that was answered is kept, once, with its body; a dedup id gives one id
- a claim that was answered is kept, and no other client was given that message with that epoch
- a delete, extension or release that was answered is kept, with the epoch of the receipt
- a receipt is refused only if its claim has ended
- no message comes back after its delete was answered

and in the end, that every push that was answered was given to a client, who deleted it: from its
queue, or from its dead-letter queue.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cluster.placement import shard_identity, shard_of_id
from penstock.core.events import Deleted
from penstock.core.receipts import MessageIds
from penstock.service import Claim, Message, Push, PushReply
from tests.simulation.lineage import GONE, IN_FLIGHT, Life
from tests.simulation.network import EPOCH_MS

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

# How old an answer that changes nothing may be; see `nodes`.
_STALE_MS: Final = 100


@dataclass(frozen=True, slots=True)
class AnsweredClaim:
    """A claim that was answered; `number` and `epoch` are those in its shard.

    A message that came from another shard has another number and other epochs for its clients.
    """

    queue: str
    shard: int
    number: int
    epoch: int
    claim: Claim


class ClusterLedger:
    """The answers that all clients got."""

    def __init__(self, cluster: "SimulatedCluster") -> None:
        self._cluster = cluster
        self._schedule = cluster.schedule
        identity = cluster.settings.identity
        self._ids = [
            MessageIds(shard_identity(identity, shard)) for shard in range(cluster.profile.shards)
        ]
        # The id that was answered for each dedup id, and the pull that was given each claim.
        self._dedups: dict[tuple[str, str], str] = {}
        self._given: dict[tuple[int, int, int], str] = {}
        # When each delete was answered, and how often the message had been claimed by then.
        self._deleted: dict[tuple[int, int], tuple[int, int]] = {}
        # The bodies of pushes that were answered, with their queues; and how many deletes of each
        # body were done by their own receipts, or may have been.
        self.pushed: dict[bytes, str] = {}
        self._deletes: Counter[bytes] = Counter()
        # The id under which clients have seen each body.
        self._ids_of: dict[bytes, str] = {}
        self.answers = 0

    def _life(self, shard: int, number: int) -> Life | None:
        return self._cluster.truths[shard].lives.get(number)

    def _place(self, message_id: str) -> tuple[int, int]:
        """The shard and the number of a message."""
        shard = shard_of_id(message_id, self._cluster.settings.identity)
        assert shard is not None, f"an id of another cluster: {message_id}"
        return shard, self._ids[shard].read(message_id)

    def note_pushed(self, push: Push, reply: PushReply) -> None:
        """A push was answered."""
        self.answers += 1
        life = self._life(*self._place(reply.id))
        if life is None:
            self._schedule.violate(f"a push was answered that is not kept: {reply}")
        elif push.dedup_id is None and life.body != push.body:
            self._schedule.violate(f"a push was answered with the id of another: {reply}")
        # No other push has the body of one without a dedup id, unless it is the same again, in a
        # queue where contents are dedup ids.
        dedup_id = push.dedup_id or push.body.decode()
        first = self._dedups.setdefault((push.queue, dedup_id), reply.id)
        if first != reply.id:
            self._schedule.violate(
                f"two pushes with the dedup id {dedup_id} are {first} and {reply.id}"
            )
        if life is not None:
            self.pushed.setdefault(life.body, push.queue)

    def note_claimed(self, queue: str, who: str, claim: Claim) -> AnsweredClaim:
        """A claim was answered; `who` is the same for an attempt that is repeated."""
        self.answers += 1
        shard, number, epoch = _in_receipt(claim.receipt)
        life = self._life(shard, number)
        self._check_id(claim)
        if life is None or life.epoch < epoch or claim.epoch < epoch:
            self._schedule.violate(f"a claim was answered that is not kept: {claim}")
        elif life.body != claim.body:
            self._schedule.violate(f"a claim has the body of another message: {claim}")
        first = self._given.setdefault((shard, number, epoch), who)
        if first != who:
            self._schedule.violate(
                f"message {number} was given out twice under epoch {epoch}: to {first} and to {who}"
            )
        if epoch > self._deleted.get((shard, number), (0, epoch))[1]:
            self._schedule.violate(f"message {number} came back after its delete was answered")
        return AnsweredClaim(queue, shard, number, epoch, claim)

    def _check_id(self, message: Message) -> None:
        """Checks that a message keeps its id, in whichever shards and queues it comes to be."""
        first = self._ids_of.setdefault(message.body, message.id)
        if first != message.id:
            self._schedule.violate(f"{message.body!r} was {first} and is {message.id} now")

    def note_shown(self, message: Message, asked_ms: int) -> None:
        """A message was returned by a peek that was sent at `asked_ms`."""
        self._check_id(message)
        if self._cluster.lineage.was_pushed_again(message.body):
            # It is in another place than its id says, and may have been deleted in that one only.
            return
        deleted = self._deleted.get(self._place(message.id))
        if deleted is not None and deleted[0] < asked_ms - _STALE_MS:
            self._schedule.violate(f"{message.id} is shown, and its delete was answered")

    def note_delete_sent(self, held: AnsweredClaim) -> None:
        """A delete is about to be sent."""
        self._deletes[held.claim.body] += 1

    def note_delete_refused(self, held: AnsweredClaim) -> None:
        """A delete was refused: its receipt is stale."""
        self._deletes[held.claim.body] -= 1
        self.note_refused(held)

    def note_deleted(self, held: AnsweredClaim, was_there: bool) -> None:
        """A delete was answered."""
        self.answers += 1
        life = self._life(held.shard, held.number)
        by = None if life is None else life.ended_by
        is_own = type(by) is Deleted and by.epoch == held.epoch
        # It may have been in the dead-letter queue then, and redriven since.
        is_back = life is not None and life.redriven_epoch >= held.epoch
        is_there = life is not None and life.is_live and life.queue.name == held.queue
        if life is None or (is_there and (was_there or not is_back)):
            self._schedule.violate(f"a delete was answered that is not kept: {held}")
            return
        if was_there and not is_own:
            self._schedule.violate(f"an old receipt has deleted a message: {held}")
        if not is_own:
            # Another client deleted it, or a redrive, or it is in its dead-letter queue.
            self._deletes[held.claim.body] -= 1
        if life.state == GONE:
            self._deleted[held.shard, held.number] = (self._schedule.now_ms, life.epoch)

    def note_released(self, held: AnsweredClaim) -> None:
        """A release was answered."""
        self.answers += 1
        if self._is_live(held):
            self._schedule.violate(f"a release was answered that is not kept: {held}")

    def note_extended(self, held: AnsweredClaim, deadline_ms: int) -> None:
        """An extension was answered."""
        self.answers += 1
        life = self._life(held.shard, held.number)
        is_held = life is not None and (life.state, life.epoch) == (IN_FLIGHT, held.epoch)
        if life is None or (is_held and life.deadline_ms < deadline_ms):
            self._schedule.violate(f"an extension was answered that is not kept: {held}")

    def note_refused(self, held: AnsweredClaim) -> None:
        """A receipt was refused as stale."""
        if self._is_live(held):
            self._schedule.violate(f"the receipt of a valid claim was refused: {held}")

    def _is_live(self, held: AnsweredClaim) -> bool:
        """Whether a claim is the current one, and has not run out by any node's clock."""
        life = self._life(held.shard, held.number)
        now_ms = EPOCH_MS + self._schedule.now_ms + self._cluster.profile.skew_ms_max
        return (
            life is not None
            and (life.state, life.epoch) == (IN_FLIGHT, held.epoch)
            and life.deadline_ms > now_ms
        )

    def check_drained(self) -> None:
        """Checks, once all queues are empty, that clients have had every message."""
        for body, queue in self.pushed.items():
            if not self._deletes[body]:
                self._schedule.violate(
                    f"queue {queue}: the push of {body!r} was answered, all queues are empty, and "
                    "no client has deleted it"
                )


def _in_receipt(receipt: str) -> tuple[int, int, int]:
    """The shard, the number and the epoch in a receipt (`core.receipts`)."""
    shard, _, fields = receipt.partition("-")
    return int(shard, 16), int(fields[16:32], 16), int(fields[32:48], 16)
