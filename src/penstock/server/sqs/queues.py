"""The SQS actions on queues: making, finding, describing, tagging, permitting, purging, ending."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Final

import msgspec

from penstock.core.queue import QueueState
from penstock.server.sqs.store import Caller, Store, no_such_queue
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    DescribeQueue,
    ListQueues,
    Purge,
    QueueSettings,
    Stats,
)
from penstock.wire.sqs import attributes as attributes
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs import model as model
from penstock.wire.sqs.address import (
    QueueAddress,
    is_account,
    is_fifo_name,
    is_standard_name,
    partition,
)
from penstock.wire.sqs.errors import Refusal, absent, invalid_value, missing

TAGS_MAX: Final = 50
TAG_KEY_CHARS_MAX: Final = 128
TAG_VALUE_CHARS_MAX: Final = 256
RESULTS_MAX: Final = 1_000
LABEL_CHARS_MAX: Final = 80
PERMITTED_ACTIONS_MAX: Final = 7
_BAD_NAME: Final = (
    "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length"
)
# What no permission can give away.
_OF_THE_OWNER: Final = frozenset(
    {
        "AddPermission",
        "CancelMessageMoveTask",
        "CreateQueue",
        "DeleteQueue",
        "ListMessageMoveTasks",
        "ListQueueTags",
        "ListQueues",
        "RemovePermission",
        "SetQueueAttributes",
        "StartMessageMoveTask",
        "TagQueue",
        "UntagQueue",
    }
)
# The note of when a queue was last purged.
_PURGED: Final = ".purged"
_BAD_TAG_KEY: Final = "Tag keys must be between 1 and 128 characters in length."
_BAD_FIFO_NAME: Final = (
    "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, "
    "must end with .fifo suffix and be 1 to 80 in length."
)


class QueueActions:
    """The actions on queues."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._submit = store.submit

    # Making and finding.

    def create(self, asked: model.CreateQueueRequest, caller: Caller) -> model.QueueUrlResult:
        """CreateQueue."""
        name = asked.queue_name or ""
        given = asked.attributes or {}
        fifo = _wants_fifo(name, given)
        changes = attributes.read(given, fifo)
        inside = self._store.directory.inside(QueueAddress(caller.owner, name))
        existing = self._store.names.get(inside)
        if existing is not None:
            self._check_same(existing, given)
            return model.QueueUrlResult(self._store.url(caller, inside))
        self._check_not_deleted_lately(inside)
        annotations = attributes.merged(QueueSettings(), changes)
        tags = asked.creation_tags
        if tags:
            annotations[attributes.TAGS] = _tags_text({}, tags, name)
        settings = {
            "fifo": fifo,
            "in_flight_max": attributes.IN_FLIGHT_MAX,
            "annotations": annotations,
            **changes.settings,
            **self._redrive(changes, inside, fifo, annotations),
        }
        attributes.check_throughput(msgspec.structs.replace(QueueSettings(), **settings))
        self._submit(CreateQueue(inside, settings))
        return model.QueueUrlResult(self._store.url(caller, inside))

    def _check_same(self, queue: QueueState, given: dict[str, str]) -> None:
        shown = self._shown(queue)
        for name, value in given.items():
            have = shown.get(name, "")
            if have != value and _plain(have) != _plain(value):
                raise Refusal(
                    faults.QUEUE_NAME_EXISTS,
                    "A queue already exists with the same name and a different value for "
                    f"attribute {name}",
                )

    def _check_not_deleted_lately(self, inside: str) -> None:
        deleted = self._store.deleted_at_ms
        now_ms = self._store.now_ms()
        window_ms = self._store.windows.deleted_ms
        for name in [each for each, at_ms in deleted.items() if at_ms + window_ms <= now_ms]:
            del deleted[name]
        if inside in deleted:
            raise Refusal(
                faults.QUEUE_DELETED_RECENTLY,
                "You must wait 60 seconds after deleting a queue before you can create another "
                "with the same name.",
            )

    def _redrive(
        self, changes: attributes.Changes, inside: str, fifo: bool, annotations: dict[str, str]
    ) -> dict[str, str | int | None]:
        """The settings a redrive policy makes; a queue may name itself, which moves nothing.

        Raises Refusal if the target will not have it.
        """
        redrive = changes.redrive
        if not isinstance(redrive, attributes.RedrivePolicy):
            return {} if redrive is None else attributes.NO_REDRIVE
        source = self._store.directory.address(inside)
        attributes.check_near(redrive, source)
        target = self._store.find(redrive.target.owner, redrive.target.name)
        if redrive.target == source:
            annotations[attributes.WITHHELD] = annotations.pop(attributes.REDRIVE)
            return attributes.NO_REDRIVE
        if target is None:
            raise invalid_value(redrive.text, "RedrivePolicy", "Dead letter target does not exist.")
        if target.settings.fifo != fifo:
            raise invalid_value(
                redrive.text,
                "RedrivePolicy",
                "Dead-letter queue must be same type of queue as the source.",
            )
        if not attributes.allows(target.settings, self._store.arn(inside)):
            raise invalid_value(
                redrive.text,
                "RedrivePolicy",
                "The redrive allow policy of the dead-letter queue does not allow this queue as a "
                "source queue.",
            )
        return {"dead_letter": target.name, "max_receives": redrive.receives_max}

    def _allow_again(self, target: QueueState) -> None:
        """A queue's allow policy has changed: its sources send it dead letters, or no longer do."""
        arn = self._store.arn(target.name)
        for name in self._store.sources_of(target.name):
            source = self._store.names[name].settings
            allowed = attributes.allows(target.settings, self._store.arn(name))
            if name == target.name or allowed == (source.dead_letter is not None):
                continue
            policy = attributes.redrive_shown(source, arn)
            kept, dropped = attributes.WITHHELD, attributes.REDRIVE
            settings: dict[str, Any] = dict(attributes.NO_REDRIVE)
            if allowed:
                kept, dropped = dropped, kept
                receives_max = attributes.receives_max_of(policy)
                settings = {"dead_letter": target.name, "max_receives": receives_max}
            settings["annotations"] = {**source.annotations, kept: policy}
            settings["annotations"].pop(dropped, None)
            self._submit(ConfigureQueue(name, settings))

    def url(self, asked: model.GetQueueUrlRequest, caller: Caller) -> model.QueueUrlResult:
        """GetQueueUrl."""
        account = asked.queue_owner_account or caller.owner.account
        owner = caller.owner._replace(account=account)
        queue = self._store.find(owner, asked.queue_name or "")
        if queue is None or not caller.may_reach(owner):
            raise no_such_queue()
        return model.QueueUrlResult(self._store.url(caller, queue.name))

    def list(self, asked: model.ListQueuesRequest, caller: Caller) -> model.QueueUrlsResult:
        """ListQueues."""
        prefix = asked.queue_name_prefix or ""
        names = self._submit(ListQueues(prefix, "", 2**31))
        mine = [name for name in names if self._store.directory.address(name).owner == caller.owner]
        page, token = _page(mine, asked.max_results, asked.next_token, prefix)
        return model.QueueUrlsResult([self._store.url(caller, name) for name in page], token)

    def sources(
        self, asked: model.ListDeadLetterSourceQueuesRequest, caller: Caller
    ) -> model.SourceUrlsResult:
        """ListDeadLetterSourceQueues."""
        queue = self._store.locate(asked.queue_url or "", caller)
        names = self._store.sources_of(queue.name)
        page, token = _page(names, asked.max_results, asked.next_token)
        return model.SourceUrlsResult([self._store.url(caller, name) for name in page], token)

    def delete(self, asked: model.QueueRequest, caller: Caller) -> None:
        """DeleteQueue."""
        queue = self._store.locate(asked.queue_url or "", caller)
        self._submit(DeleteQueue(queue.name))
        if self._store.windows.deleted_ms:
            self._store.deleted_at_ms[queue.name] = self._store.now_ms()

    def purge(self, asked: model.QueueRequest, caller: Caller) -> None:
        """PurgeQueue."""
        queue = self._store.locate(asked.queue_url or "", caller)
        now_ms = self._store.now_ms()
        window_ms = self._store.windows.purged_ms
        purged_at_ms = int(queue.settings.annotations.get(_PURGED, -window_ms))
        if purged_at_ms + window_ms > now_ms:
            name = self._store.directory.address(queue.name).name
            raise Refusal(
                faults.PURGE_QUEUE_IN_PROGRESS,
                f"Only one PurgeQueue operation on {name} is allowed every 60 seconds.",
            )
        self._submit(Purge(queue.name))
        if window_ms:
            self._store.note(queue, _PURGED, str(now_ms))

    # Attributes.

    def attributes(
        self, asked: model.GetQueueAttributesRequest, caller: Caller
    ) -> model.AttributesResult:
        """GetQueueAttributes."""
        queue = self._store.locate(asked.queue_url or "", caller)
        names = asked.attribute_names or []
        for name in names:
            if name not in attributes.KNOWN:
                raise Refusal(faults.INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name}.")
        if not names:
            return model.AttributesResult({})
        shown = self._shown(queue)
        if "All" not in names:
            shown = {name: shown[name] for name in names if name in shown}
        return model.AttributesResult(shown)

    def _shown(self, queue: QueueState) -> dict[str, str]:
        dead = queue.settings.dead_letter
        return attributes.show(
            self._submit(DescribeQueue(queue.name)),
            self._submit(Stats(queue.name)),
            self._store.arn(queue.name),
            "" if dead is None else self._store.arn(dead),
        )

    def set_attributes(self, asked: model.SetQueueAttributesRequest, caller: Caller) -> None:
        """SetQueueAttributes."""
        queue = self._store.locate(asked.queue_url or "", caller)
        given = asked.attributes or {}
        if not given:
            raise absent("SetQueueAttributes", "Attributes")
        fifo = queue.settings.fifo
        if "FifoQueue" in given:
            if not fifo:
                raise Refusal(faults.INVALID_ATTRIBUTE_NAME, "Unknown Attribute FifoQueue.")
            if given["FifoQueue"].lower() != "true":
                raise Refusal(
                    faults.INVALID_ATTRIBUTE_VALUE,
                    "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is "
                    "not supported.",
                )
        changes = attributes.read(given, fifo)
        attributes.check_statements(changes)
        annotations = attributes.merged(queue.settings, changes)
        settings = {
            **changes.settings,
            "annotations": annotations,
            **self._redrive(changes, queue.name, fifo, annotations),
        }
        attributes.defer_scope(queue.settings, settings, self._store.now_ms())
        attributes.check_throughput(msgspec.structs.replace(queue.settings, **settings))
        self._submit(ConfigureQueue(queue.name, settings))
        if attributes.ALLOW_POLICY in given:
            self._allow_again(queue)

    # Tags.

    def tags(self, asked: model.QueueRequest, caller: Caller) -> model.TagsResult:
        """ListQueueTags."""
        return model.TagsResult(_tags(self._store.locate(asked.queue_url or "", caller)))

    def tag(self, asked: model.TagQueueRequest, caller: Caller) -> None:
        """TagQueue."""
        queue = self._store.locate(asked.queue_url or "", caller)
        if not asked.tags:
            raise missing("Tags")
        text = _tags_text(_tags(queue), asked.tags, queue.name)
        self._annotate(queue, attributes.TAGS, text)

    def untag(self, asked: model.UntagQueueRequest, caller: Caller) -> None:
        """UntagQueue."""
        queue = self._store.locate(asked.queue_url or "", caller)
        if not asked.tag_keys:
            raise Refusal(faults.INVALID_PARAMETER_VALUE, _BAD_TAG_KEY)
        tags = {key: value for key, value in _tags(queue).items() if key not in asked.tag_keys}
        self._annotate(queue, attributes.TAGS, msgspec.json.encode(tags).decode() if tags else None)

    def _annotate(self, queue: QueueState, name: str, text: str | None) -> None:
        annotations = {
            key: value for key, value in queue.settings.annotations.items() if key != name
        }
        if text is not None:
            annotations[name] = text
        self._submit(ConfigureQueue(queue.name, {"annotations": annotations}))

    # Permissions.

    def permit(self, asked: model.AddPermissionRequest, caller: Caller) -> None:
        """AddPermission."""
        queue = self._store.locate(asked.queue_url or "", caller)
        label = _check_label(asked.label or "")
        accounts = asked.aws_account_ids or []
        actions = asked.actions or []
        if not actions:
            raise missing("Actions")
        _check_permitted(accounts, actions)
        policy = _policy(queue, self._store.arn(queue.name))
        region = self._store.directory.address(queue.name).owner.region
        principals = [f"arn:{partition(region)}:iam::{each}:root" for each in accounts]
        permitted = [f"SQS:{each}" for each in actions]
        statement = {
            "Sid": label,
            "Effect": "Allow",
            "Principal": {"AWS": principals[0] if len(principals) == 1 else principals},
            "Action": permitted[0] if len(permitted) == 1 else permitted,
            "Resource": self._store.arn(queue.name),
        }
        if statement in policy["Statement"]:
            return
        if any(each.get("Sid") == label for each in policy["Statement"]):
            raise invalid_value(label, "Label", "Already exists.")
        policy["Statement"].append(statement)
        count = len(policy["Statement"])
        if count > attributes.STATEMENTS_MAX:
            raise Refusal(
                faults.OVER_LIMIT,
                f"{count} Statements were found, maximum allowed is {attributes.STATEMENTS_MAX}.",
            )
        self._annotate(queue, attributes.POLICY, msgspec.json.encode(policy).decode())

    def forbid(self, asked: model.RemovePermissionRequest, caller: Caller) -> None:
        """RemovePermission."""
        queue = self._store.locate(asked.queue_url or "", caller)
        policy = _policy(queue, self._store.arn(queue.name))
        kept = [each for each in policy["Statement"] if each.get("Sid") != asked.label]
        if len(kept) == len(policy["Statement"]):
            raise invalid_value(asked.label, "Label", "can't find label.")
        policy["Statement"] = kept
        text = msgspec.json.encode(policy).decode() if kept else None
        self._annotate(queue, attributes.POLICY, text)


def _wants_fifo(name: str, given: dict[str, str]) -> bool:
    """Whether a FIFO queue is to be made. Raises Refusal if the name says otherwise."""
    asked = given.get("FifoQueue")
    if asked is not None and asked.lower() not in ("true", "false"):
        raise Refusal(faults.INVALID_ATTRIBUTE_VALUE, "Invalid value for the parameter FifoQueue.")
    fifo = asked is not None and asked.lower() == "true"
    if fifo and not is_fifo_name(name):
        raise Refusal(faults.INVALID_PARAMETER_VALUE, _BAD_FIFO_NAME)
    if not fifo and not is_standard_name(name):
        raise Refusal(faults.INVALID_PARAMETER_VALUE, _BAD_NAME)
    if asked is not None and not fifo:
        raise Refusal(faults.INVALID_ATTRIBUTE_NAME, "Unknown Attribute FifoQueue.")
    return fifo


def _plain(text: str) -> Any:
    """An attribute as data, so that two ways to write it compare equal."""
    if text.lower() in ("true", "false"):
        return text.lower()
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text.lower()
    if isinstance(value, dict) and "maxReceiveCount" in value:
        value["maxReceiveCount"] = str(value["maxReceiveCount"])
    return value


def _page(
    names: list[str], limit: int | None, token: str | None, scope: str = ""
) -> tuple[list[str], str | None]:
    """One page of names, and the token for the next. Raises Refusal.

    `scope` is what was asked for: a token is good for nothing else.
    """
    if limit is not None and not 1 <= limit <= RESULTS_MAX:
        raise Refusal(
            faults.INVALID_PARAMETER_VALUE,
            "Value for parameter MaxResults is invalid. Reason: MaxResults must be an integer "
            f"between 1 and {RESULTS_MAX}.",
        )
    after = "" if token is None else _read_token(token, limit, scope)
    following = [name for name in names if name > after]
    page = following[: limit or RESULTS_MAX]
    # Without a limit there is one page: that is how callers ask who do not know of tokens.
    if limit is None or len(page) == len(following):
        return page, None
    return page, urlsafe_b64encode(f"{page[-1]} {scope}".encode()).decode()


def _read_token(token: str, limit: int | None, scope: str) -> str:
    """The name after which a page begins. Raises Refusal."""
    if limit is None:
        raise Refusal(
            faults.INVALID_PARAMETER_VALUE,
            "MaxResults is a mandatory parameter when you provide a value for NextToken.",
        )
    reason = "Invalid NextToken value."
    try:
        after, _, of_scope = urlsafe_b64decode(token.encode("ascii")).decode().partition(" ")
    except ValueError:
        raise Refusal(faults.INVALID_PARAMETER_VALUE, reason) from None
    if of_scope != scope:
        reason += (
            " If you are passing in NextToken, you must not change the other request parameters."
        )
        raise Refusal(faults.INVALID_PARAMETER_VALUE, reason)
    return after


def _tags(queue: QueueState) -> dict[str, str]:
    text = queue.settings.annotations.get(attributes.TAGS)
    return msgspec.json.decode(text, type=dict[str, str]) if text else {}


def _tags_text(have: dict[str, str], given: dict[str, str], name: str) -> str:
    for key, value in given.items():
        if not 1 <= len(key) <= TAG_KEY_CHARS_MAX:
            raise Refusal(faults.INVALID_PARAMETER_VALUE, _BAD_TAG_KEY)
        if len(value) > TAG_VALUE_CHARS_MAX:
            raise Refusal(
                faults.INVALID_PARAMETER_VALUE,
                f"Tag values must be between 0 and {TAG_VALUE_CHARS_MAX} characters in length.",
            )
    tags = {**have, **given}
    if len(tags) > TAGS_MAX:
        raise Refusal(faults.INVALID_PARAMETER_VALUE, f"Too many tags added for queue {name}.")
    return msgspec.json.encode(tags).decode()


def _check_label(label: str) -> str:
    if not is_standard_name(label):
        raise invalid_value(
            label,
            "Label",
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length.",
        )
    return label


def _check_permitted(accounts: list[str], actions: list[str]) -> None:
    strangers = [account for account in accounts if not is_account(account)]
    if strangers or not accounts:
        raise invalid_value(f"[{', '.join(strangers)}]", "PrincipalId", "Unable to verify.")
    if len(actions) > PERMITTED_ACTIONS_MAX:
        raise Refusal(
            faults.OVER_LIMIT,
            f"{len(actions)} Actions were found, maximum allowed is {PERMITTED_ACTIONS_MAX}.",
        )
    for action in actions:
        if action in _OF_THE_OWNER:
            raise invalid_value(
                f"SQS:{action}",
                "ActionName",
                "Only the queue owner is allowed to invoke this action.",
            )
        # Whoever may do a thing alone may do it by ten: batches have no names here.
        if action != "*" and (action not in model.ACTIONS or action.endswith("Batch")):
            raise invalid_value(
                f"SQS:{action}",
                "ActionName",
                "Please refer to the appropriate WSDL for a list of valid actions.",
            )


def _policy(queue: QueueState, arn: str) -> dict[str, Any]:
    text = queue.settings.annotations.get(attributes.POLICY)
    policy: dict[str, Any] = msgspec.json.decode(text) if text else {}
    policy.setdefault("Version", "2008-10-17")
    policy.setdefault("Id", f"{arn}/SQSDefaultPolicy")
    policy["Statement"] = attributes.statements_of(policy) or []
    return policy
