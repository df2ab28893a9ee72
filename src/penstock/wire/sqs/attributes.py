"""Translates a queue's SQS attributes into the core's settings, and back.

Attributes that affect the core become settings. The others (policies, encryption, throughput modes,
tags) are stored in the settings' annotations and returned unchanged. `read` returns the changes for
a set of attributes, or refuses them; `show` returns the attributes of a queue.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from penstock.service import QueueInfo, QueueSettings, QueueStats
from penstock.wire.sqs.address import QueueAddress, read_arn
from penstock.wire.sqs.errors import (
    INVALID_ATTRIBUTE_NAME,
    INVALID_ATTRIBUTE_VALUE,
    INVALID_PARAMETER_VALUE,
    OVER_LIMIT,
    Refusal,
    invalid_value,
)

IN_FLIGHT_MAX: Final = 120_000
SOURCES_MAX: Final = 10
RECEIVES_MAX: Final = 1_000
TAGS: Final = "Tags"
POLICY: Final = "Policy"
ALLOW_POLICY: Final = "RedriveAllowPolicy"
KMS_KEY: Final = "KmsMasterKeyId"
KMS_REUSE: Final = "KmsDataKeyReusePeriodSeconds"
MANAGED_SSE: Final = "SqsManagedSseEnabled"
THROUGHPUT: Final = "FifoThroughputLimit"
# A redrive policy as it was given; and one that is shown but has no effect, because the queue names
# itself, or its target no longer allows it.
REDRIVE: Final = "RedrivePolicy"
WITHHELD: Final = ".redrive"
_REDRIVE_FIELDS: Final = ("deadLetterTargetArn", "maxReceiveCount")
NO_REDRIVE: Final[dict[str, str | int | None]] = {"dead_letter": None, "max_receives": None}
STATEMENTS_MAX: Final = 20
# Decoding takes time for each value, so the length of a text that may hold many is limited.
POLICY_CHARS_MAX: Final = 32 * 1024
KEY_CHARS_MAX: Final = 2_048
# A scope that was set and does not apply yet, and the instant from which it applies.
SCOPE: Final = "DeduplicationScope"
SCOPE_DELAY_MS: Final = 60_000
_KMS_REUSE_DEFAULT: Final = "300"
_NUMBER_CHARS_MAX: Final = 16


class Number(NamedTuple):
    """An attribute that is a whole number within limits, and its setting."""

    low: int
    high: int
    setting: str
    factor: int = 1


NUMBERS: Final = {
    "VisibilityTimeout": Number(0, 43_200, "visibility_ms", 1_000),
    "DelaySeconds": Number(0, 900, "delay_ms", 1_000),
    "ReceiveMessageWaitTimeSeconds": Number(0, 20, "wait_ms", 1_000),
    "MessageRetentionPeriod": Number(60, 1_209_600, "retention_ms", 1_000),
    "MaximumMessageSize": Number(1_024, 1_048_576, "body_bytes_max"),
}
READ_ONLY: Final = frozenset(
    {
        "ApproximateNumberOfMessages",
        "ApproximateNumberOfMessagesNotVisible",
        "ApproximateNumberOfMessagesDelayed",
        "CreatedTimestamp",
        "LastModifiedTimestamp",
        "QueueArn",
    }
)
FIFO_ONLY: Final = frozenset({"ContentBasedDeduplication", SCOPE, THROUGHPUT})
SETTABLE: Final = frozenset(
    {*NUMBERS, POLICY, REDRIVE, ALLOW_POLICY, KMS_KEY, KMS_REUSE, MANAGED_SSE, *FIFO_ONLY}
)
KNOWN: Final = frozenset({"All", "FifoQueue", *READ_ONLY, *SETTABLE})


class RedrivePolicy(NamedTuple):
    """A redrive policy: where dead letters go, and after how many receives."""

    target: QueueAddress
    receives_max: int
    text: str


class Changes(NamedTuple):
    """The changes a set of attributes asks for; an annotation of None is to be removed.

    `redrive` is False when a redrive policy is to be removed, None when none was given.
    """

    settings: dict[str, Any]
    annotations: dict[str, str | None]
    redrive: RedrivePolicy | bool | None


def read(attributes: dict[str, str], fifo: bool) -> Changes:
    """The changes these attributes ask for, on a queue of this type. Raises Refusal."""
    changes = Changes({}, {}, None)
    for name, value in attributes.items():
        if name in NUMBERS:
            number = NUMBERS[name]
            whole = _whole(name, value, number.low, number.high)
            changes.settings[number.setting] = whole * number.factor
        elif name == REDRIVE:
            changes = changes._replace(redrive=_read_redrive(value) if value else False)
            changes.annotations[REDRIVE] = value or None
            changes.annotations[WITHHELD] = None
        elif name in _READERS:
            if name in FIFO_ONLY and not fifo:
                raise _only_fifo(name)
            _READERS[name](name, value, changes)
        elif name != "FifoQueue":
            raise Refusal(INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name}.")
    return changes


def _only_fifo(name: str) -> Refusal:
    if name == "ContentBasedDeduplication":
        return Refusal(INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name}.")
    return Refusal(
        INVALID_ATTRIBUTE_NAME, f"You can specify the {name} only when FifoQueue is set to true."
    )


def _bad_value(name: str) -> Refusal:
    return Refusal(INVALID_ATTRIBUTE_VALUE, f"Invalid value for the parameter {name}.")


def _whole(name: str, value: str, low: int, high: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 10):
        raise _bad_value(name)
    if not low <= int(value) <= high:
        raise _bad_value(name)
    return int(value)


def _truth(name: str, value: str) -> bool:
    lowered = value.lower()
    if lowered not in ("true", "false"):
        raise _bad_value(name)
    return lowered == "true"


def _read_content_dedup(name: str, value: str, changes: Changes) -> None:
    changes.settings["dedup_by_content"] = _truth(name, value)


def _read_scope(name: str, value: str, changes: Changes) -> None:
    if value not in ("queue", "messageGroup"):
        raise _bad_value(name)
    changes.settings["dedup_per_group"] = value == "messageGroup"


def _read_throughput(name: str, value: str, changes: Changes) -> None:
    if value not in ("perQueue", "perMessageGroupId"):
        raise _bad_value(name)
    changes.annotations[name] = value


def _read_policy(name: str, value: str, changes: Changes) -> None:
    if value and statements_of(read_json(value)) is None:
        raise _bad_value(name)
    changes.annotations[name] = value or None


def statements_of(policy: Any) -> list[dict[str, Any]] | None:
    """The statements of a policy, where a single one needs no list; None if it is no policy."""
    statements = policy.get("Statement", []) if isinstance(policy, dict) else None
    if isinstance(statements, dict):
        return [statements]
    if isinstance(statements, list) and all(isinstance(each, dict) for each in statements):
        return statements
    return None


def _read_key(name: str, value: str, changes: Changes) -> None:
    if len(value) > KEY_CHARS_MAX:
        raise _bad_value(name)
    changes.annotations[name] = value or None


def _read_reuse(name: str, value: str, changes: Changes) -> None:
    changes.annotations[name] = str(_whole(name, value, 60, 86_400))


def _read_managed(name: str, value: str, changes: Changes) -> None:
    changes.annotations[name] = "true" if _truth(name, value) else "false"


def _read_allow(name: str, value: str, changes: Changes) -> None:
    if value:
        _check_allow(value)
    changes.annotations[name] = value or None


_READERS: Final[dict[str, Callable[[str, str, Changes], None]]] = {
    "ContentBasedDeduplication": _read_content_dedup,
    SCOPE: _read_scope,
    THROUGHPUT: _read_throughput,
    POLICY: _read_policy,
    ALLOW_POLICY: _read_allow,
    KMS_KEY: _read_key,
    KMS_REUSE: _read_reuse,
    MANAGED_SSE: _read_managed,
}


# Annotations that an endpoint has written are valid. Other clients can set them to any text, which
# is then read as if there were none.


def note_number(settings: QueueSettings, name: str, otherwise: int) -> int:
    """The number in an annotation, or the other one."""
    return _number(settings.annotations.get(name, ""), otherwise)


def _number(text: str, otherwise: int) -> int:
    is_number = len(text) <= _NUMBER_CHARS_MAX and text.isascii() and text.isdecimal()
    return int(text) if is_number else otherwise


def read_json(text: str) -> Any:
    """The value of a JSON text; None if it is not JSON, or longer than a policy may be."""
    if len(text) > POLICY_CHARS_MAX:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _read_redrive(text: str) -> RedrivePolicy:
    policy = read_json(text)
    if not isinstance(policy, dict):
        raise invalid_value(text, "RedrivePolicy", "Redrive policy is not a valid JSON map.")
    for name in _REDRIVE_FIELDS:
        if name not in policy:
            reason = f"Redrive policy does not contain mandatory attribute: {name}."
            raise invalid_value(text, "RedrivePolicy", reason)
    if len(policy) > len(_REDRIVE_FIELDS):
        reason = f"Only following attributes are supported: [{', '.join(_REDRIVE_FIELDS)}]."
        raise invalid_value(text, REDRIVE, reason)
    arn = policy["deadLetterTargetArn"]
    if isinstance(arn, str) and arn.count(":") == 5 and arn.split(":")[2] != "sqs":
        reason = "Only SQS queues are valid resources for deadLetterTargetArn."
        raise invalid_value(text, REDRIVE, reason)
    target = read_arn(arn)
    if target is None:
        raise invalid_value(text, "RedrivePolicy", "Invalid value for deadLetterTargetArn.")
    given = policy["maxReceiveCount"]
    count = given
    # Digits of other scripts, and superscripts, are digits to `isdigit` but not to `int`.
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 8:
        count = int(given)
    if type(count) is not int or not 1 <= count <= RECEIVES_MAX:
        raise invalid_value(
            text,
            "RedrivePolicy",
            f"Invalid value for maxReceiveCount: {given}, "
            f"valid values are from 1 to {RECEIVES_MAX} both inclusive.",
        )
    return RedrivePolicy(target, count, text)


def check_same_owner(redrive: RedrivePolicy, source: QueueAddress) -> None:
    """Checks that the target has the same region and owner as the source. Raises Refusal."""
    reason = None
    if redrive.target.owner.region != source.owner.region:
        reason = "Dead-letter target must be in same region as the source."
    elif redrive.target.owner != source.owner:
        reason = "Dead-letter target owner should be same as the source."
    if reason is not None:
        raise invalid_value(redrive.text, REDRIVE, reason)


def _check_allow(text: str) -> None:
    policy = read_json(text)
    known = isinstance(policy, dict) and policy.keys() <= {"redrivePermission", "sourceQueueArns"}
    permission = policy.get("redrivePermission") if known else None
    sources = policy.get("sourceQueueArns") if known else None
    if permission not in ("allowAll", "denyAll", "byQueue") or not _are_arns(sources):
        raise Refusal(
            INVALID_PARAMETER_VALUE,
            f"Invalid value for the parameter {ALLOW_POLICY}. Reason: Amazon SQS can't create the "
            "redrive allow policy, as it\u2019s in an unsupported format.",
        )
    reason = None
    if permission == "byQueue":
        if not sources:
            reason = (
                "When you specify the byQueue permission type, you must also specify one or more "
                "sourceQueueArns values."
            )
        elif len(sources) > SOURCES_MAX:
            reason = f"The maximum number of source queue ARNs you can specify is {SOURCES_MAX}."
    elif sources is not None:
        reason = (
            "To specify one or more source queue ARNs, you must set redrivePermission to byQueue."
        )
    if reason is not None:
        raise invalid_value(
            text, ALLOW_POLICY, f"Amazon SQS can't create the redrive allow policy. {reason}"
        )


def _are_arns(sources: Any) -> bool:
    if sources is None:
        return True
    return isinstance(sources, list) and all(read_arn(source) is not None for source in sources)


def allows(settings: QueueSettings, source_arn: str) -> bool:
    """Whether a queue takes dead letters from this source."""
    text = settings.annotations.get(ALLOW_POLICY)
    policy = read_json(text) if text else None
    if not isinstance(policy, dict):
        return True
    if policy.get("redrivePermission") == "byQueue":
        sources = policy.get("sourceQueueArns")
        return isinstance(sources, list) and source_arn in sources
    return policy.get("redrivePermission") != "denyAll"


def merged(settings: QueueSettings, changes: Changes) -> dict[str, str]:
    """The annotations after these changes. Raises Refusal if two of them exclude each other."""
    annotations = dict(settings.annotations)
    for name, value in changes.annotations.items():
        if value is None:
            annotations.pop(name, None)
        else:
            annotations[name] = value
    key_given = changes.annotations.get(KMS_KEY)
    if key_given and changes.annotations.get(MANAGED_SSE) == "true":
        raise Refusal(
            INVALID_ATTRIBUTE_NAME,
            "You can use one type of server-side encryption (SSE) at one time. "
            "You can either enable KMS SSE or SQS SSE.",
        )
    if changes.annotations.get(MANAGED_SSE) == "true":
        annotations.pop(KMS_KEY, None)
    elif annotations.get(KMS_KEY):
        # It stays so when the key is removed later.
        annotations[MANAGED_SSE] = "false"
    return annotations


def check_statements(changes: Changes) -> None:
    """A policy that is set has twenty statements at most. Raises Refusal."""
    statements = statements_of(read_json(changes.annotations.get(POLICY) or "{}"))
    if statements is not None and len(statements) > STATEMENTS_MAX:
        raise Refusal(
            OVER_LIMIT,
            f"{len(statements)} statements were found in the submitted policy, max allowed is "
            f"{STATEMENTS_MAX}",
        )


def redrive_shown(settings: QueueSettings, dead_letter_arn: str) -> str:
    """A queue's redrive policy: as it was given, unless its settings were changed since."""
    if settings.dead_letter is None:
        return settings.annotations.get(WITHHELD, "")
    given = settings.annotations.get(REDRIVE, "")
    policy = {"deadLetterTargetArn": dead_letter_arn, "maxReceiveCount": settings.max_receives}
    return given if read_json(given) == policy else msgspec.json.encode(policy).decode()


def receives_max_of(text: str) -> int:
    """How many receives a policy allows. Raises Refusal if it is none."""
    return _read_redrive(text).receives_max


def target_of(text: str) -> QueueAddress | None:
    """The dead-letter queue that a policy names."""
    policy = read_json(text)
    return read_arn(policy.get("deadLetterTargetArn")) if isinstance(policy, dict) else None


def check_throughput(settings: QueueSettings) -> None:
    """High throughput needs deduplication by group. Raises Refusal."""
    per_group, _ = scope_asked(settings)
    if settings.annotations.get(THROUGHPUT) == "perMessageGroupId" and not per_group:
        raise Refusal(
            INVALID_ATTRIBUTE_VALUE,
            "The perMessageGroupId value is allowed only when the value for DeduplicationScope is "
            "messageGroup.",
        )


def defer_scope(settings: QueueSettings, changes: dict[str, Any], now_ms: int) -> None:
    """Makes a change of the deduplication scope apply a minute from now, as on Amazon SQS."""
    per_group = changes.pop("dedup_per_group", None)
    if per_group is None:
        return
    annotations = changes["annotations"]
    annotations.pop(SCOPE, None)
    if per_group != settings.dedup_per_group:
        asked = "messageGroup" if per_group else "queue"
        annotations[SCOPE] = f"{asked} {now_ms + SCOPE_DELAY_MS}"


def scope_asked(settings: QueueSettings) -> tuple[bool, int]:
    """Whether duplicates are found per group, and from which instant on (0 for now)."""
    asked, _, from_ms = settings.annotations.get(SCOPE, "").partition(" ")
    if not asked:
        return settings.dedup_per_group, 0
    return asked == "messageGroup", _number(from_ms, 0)


def show(info: QueueInfo, stats: QueueStats, arn: str, dead_letter_arn: str) -> dict[str, str]:
    """All attributes of a queue."""
    settings = info.settings
    annotations = settings.annotations
    shown = {
        "QueueArn": arn,
        "ApproximateNumberOfMessages": str(stats.visible),
        "ApproximateNumberOfMessagesNotVisible": str(stats.in_flight),
        "ApproximateNumberOfMessagesDelayed": str(stats.delayed),
        "CreatedTimestamp": str(info.created_at_ms // 1_000),
        "LastModifiedTimestamp": str(info.configured_at_ms // 1_000),
    }
    for name, number in NUMBERS.items():
        shown[name] = str(getattr(settings, number.setting) // number.factor)
    for name in (POLICY, ALLOW_POLICY):
        if name in annotations:
            shown[name] = annotations[name]
    if settings.dead_letter is not None or WITHHELD in annotations:
        shown[REDRIVE] = redrive_shown(settings, dead_letter_arn)
    if KMS_KEY in annotations:
        shown[KMS_KEY] = annotations[KMS_KEY]
        shown[KMS_REUSE] = annotations.get(KMS_REUSE, _KMS_REUSE_DEFAULT)
        shown[MANAGED_SSE] = "false"
    else:
        shown[MANAGED_SSE] = annotations.get(MANAGED_SSE, "true")
    if settings.fifo:
        shown["FifoQueue"] = "true"
        shown["ContentBasedDeduplication"] = "true" if settings.dedup_by_content else "false"
        per_group, _ = scope_asked(settings)
        shown[SCOPE] = "messageGroup" if per_group else "queue"
        shown[THROUGHPUT] = annotations.get(THROUGHPUT, "perQueue")
    return shown
