"""The SQS actions on the tags of a queue, which are kept as one annotation in JSON."""

from typing import Final

import msgspec

from penstock.backends.loop import Steps
from penstock.server.sqs.lookup import Caller, QueueLookup, annotated
from penstock.service import QueueInfo
from penstock.wire.sqs import attributes, model
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.errors import Refusal, missing

TAGS_MAX: Final = 50
TAG_KEY_CHARS_MAX: Final = 128
TAG_VALUE_CHARS_MAX: Final = 256
_BAD_TAG_KEY: Final = "Tag keys must be between 1 and 128 characters in length."


class TagActions:
    """The actions on tags."""

    def __init__(self, lookup: QueueLookup) -> None:
        self._describe = lookup.describe

    def list(self, request: model.QueueRequest, caller: Caller) -> Steps[model.TagsResult]:
        """ListQueueTags."""
        queue = yield from self._describe(request.queue_url or "", caller)
        return model.TagsResult(_tags(queue))

    def add(self, request: model.TagQueueRequest, caller: Caller) -> Steps[None]:
        """TagQueue."""
        queue = yield from self._describe(request.queue_url or "", caller)
        if not request.tags:
            raise missing("Tags")
        text = tags_text(_tags(queue), request.tags, queue.queue)
        yield annotated(queue, attributes.TAGS, text)

    def remove(self, request: model.UntagQueueRequest, caller: Caller) -> Steps[None]:
        """UntagQueue."""
        queue = yield from self._describe(request.queue_url or "", caller)
        if not request.tag_keys:
            raise Refusal(faults.INVALID_PARAMETER_VALUE, _BAD_TAG_KEY)
        tags = {key: value for key, value in _tags(queue).items() if key not in request.tag_keys}
        text = msgspec.json.encode(tags).decode() if tags else None
        yield annotated(queue, attributes.TAGS, text)


def _tags(queue: QueueInfo) -> dict[str, str]:
    text = queue.settings.annotations.get(attributes.TAGS)
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError:
        # Written by another client: as if there were none.
        return {}


def tags_text(have: dict[str, str], given: dict[str, str], name: str) -> str:
    """The annotation for these tags and the given ones. Raises Refusal past a limit."""
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
