"""Translates a queue's settings into attributes and tags of Amazon SQS, and back.

    visibility_ms, delay_ms, wait_ms, retention_ms    attributes in whole seconds, rounded up
    body_bytes_max                                    MaximumMessageSize
    dead_letter, max_receives                         RedrivePolicy
    fifo, dedup_by_content                            FifoQueue, ContentBasedDeduplication
    dedup_per_group                                   DeduplicationScope
    annotations                                       the queue's tags

A setting that SQS does not have is refused: a queue must not appear to have a limit that it lacks.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from penstock.errors import InvalidField, UnsupportedOperation
from penstock.service import QueueInfo, QueueSettings, check_name, check_number
from penstock.wire.sqs.address import is_account, is_fifo_name, is_standard_name, read_arn
from penstock.wire.sqs.attributes import IN_FLIGHT_MAX, NUMBERS, RECEIVES_MAX

FIFO: Final = ".fifo"
_TRUTH: Final = {True: "true", False: "false"}
_SCOPE: Final = {True: "messageGroup", False: "queue"}


def read_name(name: object, field: str = "queue") -> tuple[str, str | None]:
    """A queue's name at Amazon, and the account after its `@` if any. Raises InvalidField."""
    bare, _, account = check_name(name, field).partition("@")
    if not (is_standard_name(bare) or is_fifo_name(bare)):
        raise InvalidField(
            f"{field}: {name!r} cannot be a queue of Amazon SQS; use A-Z a-z 0-9 _ -, "
            f"and {FIFO} at the end of a fifo queue's name only"
        )
    if account and not is_account(account):
        raise InvalidField(
            f"{field}: in {name!r}, what follows the @ is not an account's 12 digits"
        )
    return bare, account or None


def name_of(arn: object, account: str) -> str | None:
    """The name of the queue at an ARN, relative to this account; None if it is not a queue's."""
    address = read_arn(arn)
    if address is None:
        return None
    scope = "" if address.owner.account == account else f"@{address.owner.account}"
    return address.name + scope


def whole_seconds(value_ms: int) -> int:
    """Milliseconds as the seconds that SQS counts in, rounded up."""
    return -(-value_ms // 1_000)


def check_settings(
    queue: str, settings: QueueSettings, given: Mapping[str, Any], lacks: Mapping[str, str]
) -> None:
    """Refuses settings that a queue of SQS cannot have. Raises InvalidField, UnsupportedOperation.

    `settings` are those the queue would have, `given` those of the command.
    """
    for field, lacking in (
        ("messages_max", "capacity by messages"),
        ("bytes_max", "capacity by bytes"),
        ("in_flight_max", "in-flight limit"),
        ("priority_age_ms", "priority age"),
        ("paused", "pause"),
    ):
        if given.get(field) not in (
            None,
            False,
            IN_FLIGHT_MAX if field == "in_flight_max" else None,
        ):
            raise UnsupportedOperation(f"{field}: {lacks[lacking]}")
    if settings.fifo != queue.endswith(FIFO):
        raise InvalidField(
            f"fifo: Amazon SQS has fifo queues with names that end in {FIFO} only; {queue!r} "
            + ("does" if not settings.fifo else "does not")
        )
    if settings.dedup_by_content and not settings.fifo:
        raise UnsupportedOperation(f"dedup_by_content: {lacks['dedup by content']}")
    for number in NUMBERS.values():
        if number.setting in given:
            value = -(-given[number.setting] // number.factor)
            unit = " s" if number.factor > 1 else ""
            if not number.low <= value <= number.high:
                raise InvalidField(
                    f"{number.setting}: Amazon SQS takes {number.low} to {number.high}{unit}; "
                    f"got {value}{unit}"
                )
    if settings.dead_letter is not None:
        read_name(settings.dead_letter, "dead_letter")
        check_number("max_receives", settings.max_receives, 1, RECEIVES_MAX)
        if settings.dead_letter == queue:
            raise InvalidField(f"dead_letter: {queue!r} cannot be its own dead-letter queue")
        if settings.dead_letter.partition("@")[0].endswith(FIFO) != settings.fifo:
            raise InvalidField(
                f"dead_letter: {queue!r} and {settings.dead_letter!r} must both be fifo, or neither"
            )


def attributes_of(
    given: Mapping[str, Any], fifo: bool, dead_letter_arn: str | None
) -> dict[str, str]:
    """Translates settings into attributes; the ARN is that of the dead-letter queue."""
    attributes = {
        name: str(-(-given[number.setting] // number.factor))
        for name, number in NUMBERS.items()
        if number.setting in given
    }
    if fifo and "dedup_by_content" in given:
        attributes["ContentBasedDeduplication"] = _TRUTH[given["dedup_by_content"]]
    if fifo and "dedup_per_group" in given:
        attributes["DeduplicationScope"] = _SCOPE[given["dedup_per_group"]]
    if dead_letter_arn is not None:
        policy = {"deadLetterTargetArn": dead_letter_arn, "maxReceiveCount": given["max_receives"]}
        attributes["RedrivePolicy"] = msgspec.json.encode(policy).decode()
    elif "dead_letter" in given:
        attributes["RedrivePolicy"] = ""
    return attributes


def settings_of(
    attributes: Mapping[str, str], tags: Mapping[str, str], fifo: bool
) -> QueueSettings:
    """Translates attributes and tags into settings."""
    found: dict[str, Any] = {
        number.setting: int(attributes[name]) * number.factor
        for name, number in NUMBERS.items()
        if name in attributes
    }
    for name, read in _READERS.items():
        if name in attributes:
            read(attributes[name], attributes, found)
    return QueueSettings(**found, fifo=fifo, in_flight_max=IN_FLIGHT_MAX, annotations=dict(tags))


def info_of(queue: str, attributes: Mapping[str, str], tags: Mapping[str, str]) -> QueueInfo:
    """Describes a queue by its attributes and tags. Raises ValueError if they are malformed."""
    fifo = queue.partition("@")[0].endswith(FIFO)
    return QueueInfo(
        queue,
        settings_of(attributes, tags, fifo),
        # Some endpoints have fractions here, where Amazon has none.
        round(float(attributes.get("CreatedTimestamp", 0)) * 1_000),
        round(float(attributes.get("LastModifiedTimestamp", 0)) * 1_000),
    )


def _read_redrive(text: str, attributes: Mapping[str, str], found: dict[str, Any]) -> None:
    try:
        policy = msgspec.json.decode(text)
        receives = int(policy["maxReceiveCount"])
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
        return
    own = read_arn(attributes.get("QueueArn"))
    name = name_of(policy.get("deadLetterTargetArn"), "" if own is None else own.owner.account)
    if name is not None:
        found |= {"dead_letter": name, "max_receives": receives}


def _read_by_content(text: str, _: Mapping[str, str], found: dict[str, Any]) -> None:
    found["dedup_by_content"] = text.lower() == "true"


def _read_scope(text: str, _: Mapping[str, str], found: dict[str, Any]) -> None:
    found["dedup_per_group"] = text == _SCOPE[True]


_READERS: Final[dict[str, Callable[[str, Mapping[str, str], dict[str, Any]], None]]] = {
    "RedrivePolicy": _read_redrive,
    "ContentBasedDeduplication": _read_by_content,
    "DeduplicationScope": _read_scope,
}
