"""What a message keeps when it goes to another shard: its id, its claims, and when it was pushed.

A dead letter whose queue is in another shard is pushed there (`other_shards`), and so is a message
that is redriven there (`router`). For the shard it is a new message; two notes in its context say
what it was before, and every reply to a caller shows that.

    .source    the queue that it was dead-lettered from
    .origin    `Origin`, as JSON
"""

from typing import Final, TypeVar

import msgspec

from penstock.core.delivery import Delivery
from penstock.core.events import Pushed
from penstock.service import Claim, Message, Push

_SOURCE: Final = ".source"
_ORIGIN: Final = ".origin"
M = TypeVar("M", bound=Message)


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """A message before it came to this shard; `epoch` is how often it was claimed by then."""

    id: str
    epoch: int
    pushed_at_ms: int
    first_pulled_at_ms: int | None
    dedup_id: str | None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Origin).decode


def _read(context: dict[str, str] | None) -> Origin | None:
    """The origin in a message's context; None if it has none that Penstock has written."""
    text = (context or {}).get(_ORIGIN)
    if text is None:
        return None
    try:
        return _decode(text)
    except msgspec.MsgspecError:
        return None


def _without_notes(context: dict[str, str] | None) -> dict[str, str]:
    notes = (_SOURCE, _ORIGIN)
    return {name: text for name, text in (context or {}).items() if name not in notes}


def as_dead_letter(
    push: Push, content: Pushed, delivery: Delivery, message_id: str, source: str | None
) -> Push:
    """The push of a dead letter, with notes; `message_id` is its id in its own shard."""
    before = _read(content.context)
    first_ms = delivery.first_claimed_at_ms or None
    if before is None:
        origin = Origin(
            message_id, delivery.epoch, delivery.pushed_at_ms, first_ms, content.dedup_id
        )
    else:
        origin = msgspec.structs.replace(
            before,
            epoch=before.epoch + delivery.epoch,
            first_pulled_at_ms=before.first_pulled_at_ms or first_ms,
        )
    return _with_notes(push, origin, source)


def as_redriven(push: Push, claim: Claim) -> Push:
    """The push of a redriven message, with notes; `claim` is that of the redrive, as shown.

    That claim does not count as a pull of the message.
    """
    origin = Origin(
        claim.id, claim.epoch - 1, claim.pushed_at_ms, claim.first_pulled_at_ms, claim.dedup_id
    )
    return _with_notes(push, origin, None)


def _with_notes(push: Push, origin: Origin, source: str | None) -> Push:
    context = {**_without_notes(push.context), _ORIGIN: _encode(origin).decode()}
    if source is not None:
        context[_SOURCE] = source
    return msgspec.structs.replace(push, context=context)


def as_shown(message: M) -> M:
    """The message as callers see it: as it was before it came to this shard, and without notes."""
    context = message.context
    if context is None or not (_SOURCE in context or _ORIGIN in context):
        return message
    changes: dict[str, object] = {
        "context": _without_notes(context) or None,
        "source": message.source or context.get(_SOURCE),
    }
    origin = _read(context)
    if origin is not None:
        changes |= {
            "id": origin.id,
            "dedup_id": origin.dedup_id,
            "pushed_at_ms": origin.pushed_at_ms,
            "first_pulled_at_ms": origin.first_pulled_at_ms or message.first_pulled_at_ms,
        }
        if isinstance(message, Claim):
            changes["epoch"] = origin.epoch + message.epoch
    return msgspec.structs.replace(message, **changes)
