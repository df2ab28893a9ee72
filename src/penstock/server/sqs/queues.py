"""The SQS actions on queues: create, find, list, describe, configure, purge, delete."""

from base64 import urlsafe_b64encode
from typing import Any, Final

import msgspec

from penstock.backends.loop import Steps
from penstock.server.sqs.lookup import Caller, QueueLookup, decode_opaque, no_such_queue
from penstock.server.sqs.tags import tags_text
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    ListQueues,
    Purge,
    QueueInfo,
    QueueSettings,
    QueueStats,
    Stats,
)
from penstock.wire.sqs import attributes, model
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.address import (
    QueueAddress,
    is_account,
    is_fifo_name,
    is_standard_name,
)
from penstock.wire.sqs.errors import Refusal, absent, invalid_value

RESULTS_MAX: Final = 1_000
# How many queues are configured between two pauses.
_SLICE: Final = 100
_BAD_NAME: Final = (
    "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length"
)
# The annotation that says when a queue was last purged.
_PURGED: Final = ".purged"
_BAD_FIFO_NAME: Final = (
    "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, "
    "must end with .fifo suffix and be 1 to 80 in length."
)


class QueueActions:
    """The actions on queues."""

    def __init__(self, lookup: QueueLookup) -> None:
        self._lookup = lookup
        self._describe = lookup.describe
        # A limit that the service does not support is left out: it would refuse the queue.
        self._limits: dict[str, Any] = {"in_flight_max": attributes.IN_FLIGHT_MAX}
        if "in-flight limit" in lookup.service.LACKS:
            self._limits = {}

    # Creating and finding.

    def create(
        self, request: model.CreateQueueRequest, caller: Caller
    ) -> Steps[model.QueueUrlResult]:
        """CreateQueue."""
        name = request.queue_name or ""
        given = request.attributes or {}
        fifo = _wants_fifo(name, given)
        changes = attributes.read(given, fifo)
        internal = self._lookup.directory.internal_name(QueueAddress(caller.owner, name))
        existing = yield from self._lookup.find_internal(internal)
        if existing is not None:
            yield from self._check_same(existing, given)
            return model.QueueUrlResult(self._lookup.url(caller, internal))
        self._check_deleted_window(internal)
        annotations = attributes.merged(QueueSettings(), changes)
        if caller.owner == self._lookup.directory.default:
            annotations |= self._lookup.home_note
        tags = request.creation_tags
        if tags:
            annotations[attributes.TAGS] = tags_text({}, tags, name)
        redrive = yield from self._redrive(changes, internal, fifo, annotations)
        settings = {
            "fifo": fifo,
            **self._limits,
            "annotations": annotations,
            **changes.settings,
            **redrive,
        }
        attributes.check_throughput(msgspec.structs.replace(QueueSettings(), **settings))
        yield CreateQueue(internal, settings)
        return model.QueueUrlResult(self._lookup.url(caller, internal))

    def _check_same(self, queue: QueueInfo, given: dict[str, str]) -> Steps[None]:
        shown = yield from self._shown(queue)
        for name, value in given.items():
            have = shown.get(name, "")
            if have != value and _plain(have) != _plain(value):
                raise Refusal(
                    faults.QUEUE_NAME_EXISTS,
                    "A queue already exists with the same name and a different value for "
                    f"attribute {name}",
                )

    def _check_deleted_window(self, internal: str) -> None:
        deleted = self._lookup.deleted_at_ms
        now_ms = self._lookup.now_ms()
        window_ms = self._lookup.windows.deleted_ms
        for name in [each for each, at_ms in deleted.items() if at_ms + window_ms <= now_ms]:
            del deleted[name]
        if internal in deleted:
            raise Refusal(
                faults.QUEUE_DELETED_RECENTLY,
                "You must wait 60 seconds after deleting a queue before you can create another "
                "with the same name.",
            )

    def _redrive(
        self, changes: attributes.Changes, internal: str, fifo: bool, annotations: dict[str, str]
    ) -> Steps[dict[str, str | int | None]]:
        """The settings for a redrive policy; a queue may name itself, which moves nothing.

        Raises Refusal if the policy or its target does not allow it.
        """
        redrive = changes.redrive
        if not isinstance(redrive, attributes.RedrivePolicy):
            return {} if redrive is None else attributes.NO_REDRIVE
        source = self._lookup.directory.address(internal)
        attributes.check_same_owner(redrive, source)
        if redrive.target == source:
            annotations[attributes.WITHHELD] = annotations.pop(attributes.REDRIVE)
            return attributes.NO_REDRIVE
        target = yield from self._lookup.find(redrive.target.owner, redrive.target.name)
        if target is None:
            raise invalid_value(redrive.text, "RedrivePolicy", "Dead letter target does not exist.")
        if target.settings.fifo != fifo:
            raise invalid_value(
                redrive.text,
                "RedrivePolicy",
                "Dead-letter queue must be same type of queue as the source.",
            )
        if not attributes.allows(target.settings, self._lookup.arn(internal)):
            raise invalid_value(
                redrive.text,
                "RedrivePolicy",
                "The redrive allow policy of the dead-letter queue does not allow this queue as a "
                "source queue.",
            )
        return {"dead_letter": target.queue, "max_receives": redrive.receives_max}

    def _apply_allow_policy(self, target: QueueInfo) -> Steps[None]:
        """Applies a changed allow policy: starts or stops the dead letters of its sources."""
        sources = yield from self._lookup.sources_of(target.queue)
        for number, source in enumerate(sources, 1):
            if number % _SLICE == 0:
                yield None
            # Read again, because the write below replaces all its annotations.
            queue = yield from self._lookup.find_internal(source.queue)
            if queue is not None and self._lookup.is_source(queue, target.queue):
                yield from self._allow_source(target, queue)

    def _allow_source(self, target: QueueInfo, queue: QueueInfo) -> Steps[None]:
        name, source = queue.queue, queue.settings
        allowed = attributes.allows(target.settings, self._lookup.arn(name))
        if name == target.queue or allowed == (source.dead_letter is not None):
            return
        policy = attributes.redrive_shown(source, self._lookup.arn(target.queue))
        kept, dropped = attributes.WITHHELD, attributes.REDRIVE
        settings: dict[str, Any] = dict(attributes.NO_REDRIVE)
        if allowed:
            kept, dropped = dropped, kept
            receives_max = attributes.receives_max_of(policy)
            settings = {"dead_letter": target.queue, "max_receives": receives_max}
        settings["annotations"] = {**source.annotations, kept: policy}
        settings["annotations"].pop(dropped, None)
        yield ConfigureQueue(name, settings)

    def url(self, request: model.GetQueueUrlRequest, caller: Caller) -> Steps[model.QueueUrlResult]:
        """GetQueueUrl."""
        account = request.queue_owner_account or caller.owner.account
        owner = caller.owner._replace(account=account)
        queue = None
        if is_account(account) and caller.may_reach(owner):
            queue = yield from self._lookup.find(owner, request.queue_name or "")
        if queue is None:
            elsewhere = yield from self._lookup.elsewhere(caller, request.queue_name or "")
            raise no_such_queue(owner, elsewhere)
        return model.QueueUrlResult(self._lookup.url(caller, queue.queue))

    def list(
        self, request: model.ListQueuesRequest, caller: Caller
    ) -> Steps[model.QueueUrlsResult]:
        """ListQueues."""
        prefix = request.queue_name_prefix or ""
        limit, after = _page_start(request.max_results, request.next_token, prefix)
        names: list[str] = []
        # One more than is shown: whether there is a next page.
        while len(names) <= limit:
            found: list[str] = yield ListQueues(prefix, after, RESULTS_MAX)
            address = self._lookup.directory.address
            names += [name for name in found if address(name).owner == caller.owner]
            if len(found) < RESULTS_MAX:
                break
            after = found[-1]
            yield None
        page, token = _page_end(names, request.max_results, prefix)
        return model.QueueUrlsResult([self._lookup.url(caller, name) for name in page], token)

    def sources(
        self, request: model.ListDeadLetterSourceQueuesRequest, caller: Caller
    ) -> Steps[model.SourceUrlsResult]:
        """ListDeadLetterSourceQueues."""
        queue = yield from self._describe(request.queue_url or "", caller)
        _, after = _page_start(request.max_results, request.next_token)
        sources = yield from self._lookup.sources_of(queue.queue)
        names = [source.queue for source in sources if source.queue > after]
        page, token = _page_end(names, request.max_results)
        return model.SourceUrlsResult([self._lookup.url(caller, name) for name in page], token)

    def delete(self, request: model.QueueRequest, caller: Caller) -> Steps[None]:
        """DeleteQueue."""
        queue = yield from self._lookup.locate(request.queue_url or "", caller)
        yield DeleteQueue(queue.queue)
        if self._lookup.windows.deleted_ms:
            self._lookup.deleted_at_ms[queue.queue] = self._lookup.now_ms()

    def purge(self, request: model.QueueRequest, caller: Caller) -> Steps[None]:
        """PurgeQueue."""
        queue = yield from self._describe(request.queue_url or "", caller)
        now_ms = self._lookup.now_ms()
        window_ms = self._lookup.windows.purged_ms
        purged_at_ms = attributes.note_number(queue.settings, _PURGED, -window_ms)
        if purged_at_ms + window_ms > now_ms:
            name = self._lookup.directory.address(queue.queue).name
            raise Refusal(
                faults.PURGE_QUEUE_IN_PROGRESS,
                f"Only one PurgeQueue operation on {name} is allowed every 60 seconds.",
            )
        yield Purge(queue.queue)
        if window_ms:
            yield from self._lookup.note(queue.queue, _PURGED, str(now_ms))

    # Attributes.

    def attributes(
        self, request: model.GetQueueAttributesRequest, caller: Caller
    ) -> Steps[model.AttributesResult]:
        """GetQueueAttributes."""
        queue = yield from self._describe(request.queue_url or "", caller)
        names = request.attribute_names or []
        for name in names:
            if name not in attributes.KNOWN:
                raise Refusal(faults.INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name}.")
        if not names:
            return model.AttributesResult({})
        shown = yield from self._shown(queue)
        if "All" not in names:
            shown = {name: shown[name] for name in names if name in shown}
        return model.AttributesResult(shown)

    def _shown(self, queue: QueueInfo) -> Steps[dict[str, str]]:
        dead = queue.settings.dead_letter
        stats: QueueStats = yield Stats(queue.queue)
        dead_arn = "" if dead is None else self._lookup.arn(dead)
        return attributes.show(queue, stats, self._lookup.arn(queue.queue), dead_arn)

    def set_attributes(
        self, request: model.SetQueueAttributesRequest, caller: Caller
    ) -> Steps[None]:
        """SetQueueAttributes."""
        queue = yield from self._describe(request.queue_url or "", caller)
        given = request.attributes or {}
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
        redrive = yield from self._redrive(changes, queue.queue, fifo, annotations)
        settings = {**changes.settings, "annotations": annotations, **redrive}
        attributes.defer_scope(queue.settings, settings, self._lookup.now_ms())
        attributes.check_throughput(msgspec.structs.replace(queue.settings, **settings))
        changed: QueueInfo = yield ConfigureQueue(queue.queue, settings)
        if attributes.ALLOW_POLICY in given:
            yield from self._apply_allow_policy(changed)


def _wants_fifo(name: str, given: dict[str, str]) -> bool:
    """Whether a FIFO queue is to be created. Raises Refusal if the name does not agree."""
    value = given.get("FifoQueue")
    if value is not None and value.lower() not in ("true", "false"):
        raise Refusal(faults.INVALID_ATTRIBUTE_VALUE, "Invalid value for the parameter FifoQueue.")
    fifo = value is not None and value.lower() == "true"
    if fifo and not is_fifo_name(name):
        raise Refusal(faults.INVALID_PARAMETER_VALUE, _BAD_FIFO_NAME)
    if not fifo and not is_standard_name(name):
        raise Refusal(faults.INVALID_PARAMETER_VALUE, _BAD_NAME)
    if value is not None and not fifo:
        raise Refusal(faults.INVALID_ATTRIBUTE_NAME, "Unknown Attribute FifoQueue.")
    return fifo


def _plain(text: str) -> Any:
    """An attribute's value parsed, so that two spellings of one value are equal."""
    if text.lower() in ("true", "false"):
        return text.lower()
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text.lower()
    if isinstance(value, dict) and "maxReceiveCount" in value:
        value["maxReceiveCount"] = str(value["maxReceiveCount"])
    return value


def _page_start(limit: int | None, token: str | None, scope: str = "") -> tuple[int, str]:
    """How many names a page has, and the name it begins after. Raises Refusal.

    `scope` is the request's filter: a token is valid only with the same filter.
    """
    if limit is not None and not 1 <= limit <= RESULTS_MAX:
        raise Refusal(
            faults.INVALID_PARAMETER_VALUE,
            "Value for parameter MaxResults is invalid. Reason: MaxResults must be an integer "
            f"between 1 and {RESULTS_MAX}.",
        )
    return limit or RESULTS_MAX, "" if token is None else _read_token(token, limit, scope)


def _page_end(names: list[str], limit: int | None, scope: str = "") -> tuple[list[str], str | None]:
    """The names of one page, and the token for the next one if there is one."""
    page = names[: limit or RESULTS_MAX]
    # Without a limit there is one page, for clients that do not use tokens.
    if limit is None or len(page) == len(names):
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
        after, _, of_scope = decode_opaque(token).decode().partition(" ")
    except ValueError:
        raise Refusal(faults.INVALID_PARAMETER_VALUE, reason) from None
    if of_scope != scope:
        reason += (
            " If you are passing in NextToken, you must not change the other request parameters."
        )
        raise Refusal(faults.INVALID_PARAMETER_VALUE, reason)
    return after
