"""Which queues there are, by name: their URLs, asked for once, and their attributes, for a minute.

A change of a queue's attributes takes Amazon up to a minute to make known; so nothing is lost by
believing them for as long. What is changed through this connection is seen at once.
"""

import re
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from penstock.backends.sqs.client import SqsClient
from penstock.backends.sqs.errors import no_queue
from penstock.backends.sqs.settings import FIFO, info_of, name_of, read_name
from penstock.errors import QueueNotFound
from penstock.service import QueueInfo
from penstock.wire.sqs.address import read_arn

BELIEVED_S: Final = 60.0
PAGE_MAX: Final = 1_000
_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]*", re.ASCII)
_ARN: Final = "QueueArn"


class Known:
    """A queue whose URL is known, and what was last heard of it."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.fifo = name.partition("@")[0].endswith(FIFO)
        self.arn: str | None = None
        self._info: QueueInfo | None = None
        self._heard_at_s = 0.0

    @property
    def info(self) -> QueueInfo | None:
        """The queue as last heard of, if that was less than a minute ago."""
        is_fresh = time.monotonic() - self._heard_at_s < BELIEVED_S
        return self._info if is_fresh else None

    def hear(self, info: QueueInfo) -> None:
        """Takes note of what the queue is now."""
        self._info = info
        self._heard_at_s = time.monotonic()

    def stale(self) -> None:
        """The queue is about to change: what was heard of it counts no more."""
        self._info = None


class QueueBook:
    """The queues of one connection."""

    def __init__(self, client: SqsClient) -> None:
        self.client = client
        self._known: dict[str, Known] = {}

    async def find(self, name: str) -> Known:
        """The queue of this name. Raises InvalidField or QueueNotFound."""
        try:
            return self._known[name]
        except (KeyError, TypeError):
            bare, account = read_name(name)
        asked: dict[str, Any] = {"QueueName": bare}
        account = account or self.client.account
        if account is not None:
            asked["QueueOwnerAWSAccountId"] = account
        answer = await self.client.call("get_queue_url", name, **asked)
        return self._known.setdefault(name, Known(name, answer["QueueUrl"]))

    def learn(self, name: str, url: str) -> Known:
        """Takes note of a queue that was made just now: others may not be told of it yet."""
        self._known[name] = Known(name, url)
        return self._known[name]

    def forget(self, name: str) -> None:
        """The queue of this name is gone, or may be another by now."""
        self._known.pop(name, None)

    async def ask(
        self, action: str, queue: Known, wait_s: int = 0, **parameters: Any
    ) -> Mapping[str, Any]:
        """The answer to an action on a queue. Raises PenstockError."""
        try:
            return await self.client.call(
                action, queue.name, wait_s, QueueUrl=queue.url, **parameters
            )
        except QueueNotFound:
            self.forget(queue.name)
            raise no_queue(queue.name) from None

    async def attributes(self, queue: Known, *names: str) -> Mapping[str, str]:
        """Some attributes of a queue, as they are now."""
        answer = await self.ask("get_queue_attributes", queue, AttributeNames=list(names))
        shown: Mapping[str, str] = answer.get("Attributes", {})
        return shown

    async def info(self, queue: Known) -> QueueInfo:
        """A queue's settings and dates but for its annotations, at most a minute old."""
        if queue.info is not None:
            return queue.info
        return self._heard(queue, await self._all(queue), {})

    async def described(self, queue: Known) -> QueueInfo:
        """A queue's settings and dates, as they are now."""
        shown = await self._all(queue)
        tags = await self.ask("list_queue_tags", queue)
        return self._heard(queue, shown, tags.get("Tags") or {})

    def _heard(self, queue: Known, shown: Mapping[str, str], tags: Mapping[str, str]) -> QueueInfo:
        info = info_of(queue.name, shown, tags)
        queue.hear(info)
        return info

    async def _all(self, queue: Known) -> Mapping[str, str]:
        shown = await self.attributes(queue, "All")
        queue.arn = shown.get(_ARN)
        return shown

    async def arn(self, queue: Known) -> str:
        """A queue's ARN, which never changes."""
        if queue.arn is None:
            queue.arn = (await self.attributes(queue, _ARN)).get(_ARN, "")
        return queue.arn

    def source_of(self, queue: Known, received: Mapping[str, Any]) -> str | None:
        """The queue that a received message was dead-lettered from."""
        arn = received.get("Attributes", {}).get("DeadLetterQueueSourceArn")
        own = read_arn(queue.arn)
        return None if arn is None else name_of(arn, "" if own is None else own.owner.account)

    async def sources(self, queue: Known) -> list[str]:
        """The queues that name this one as their dead-letter queue; the first page of them."""
        answer = await self.ask("list_dead_letter_source_queues", queue)
        return [_name_in(url) for url in answer.get("queueUrls", [])]

    async def names(self, prefix: str) -> list[str]:
        """The names that begin so, in order; page after page of them."""
        legal = _PREFIX.match(prefix)
        asked: dict[str, Any] = {"MaxResults": PAGE_MAX}
        if legal is not None and legal[0]:
            asked["QueueNamePrefix"] = legal[0]
        names: set[str] = set()
        while True:
            answer = await self.client.call("list_queues", **asked)
            names |= {_name_in(url) for url in answer.get("QueueUrls", [])}
            token = answer.get("NextToken")
            if not token:
                return sorted(name for name in names if name.startswith(prefix))
            asked["NextToken"] = token


def _name_in(url: str) -> str:
    return urlsplit(url).path.rpartition("/")[2]
