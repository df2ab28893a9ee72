"""The cache of queues by name: URLs until the queue is gone, attributes for a minute.

Amazon takes up to a minute to make a change of attributes visible, so clients must expect values of
that age anyway. Changes made through this connection are seen at once.
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

FRESH_S: Final = 60.0
PAGE_MAX: Final = 1_000
_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]*", re.ASCII)
_ARN: Final = "QueueArn"


class KnownQueue:
    """A queue whose URL is known, and its description when it was last read."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.fifo = name.partition("@")[0].endswith(FIFO)
        self.arn: str | None = None
        self._info: QueueInfo | None = None
        self._read_at_s = 0.0

    @property
    def info(self) -> QueueInfo | None:
        """The description, if it was read less than a minute ago."""
        is_fresh = time.monotonic() - self._read_at_s < FRESH_S
        return self._info if is_fresh else None

    def keep_info(self, info: QueueInfo) -> None:
        """Caches a description that was read just now."""
        self._info = info
        self._read_at_s = time.monotonic()

    def drop_info(self) -> None:
        """Drops the description: the queue is about to change."""
        self._info = None


class QueueCache:
    """The queues of one connection."""

    def __init__(self, client: SqsClient) -> None:
        self.client = client
        self._known: dict[str, KnownQueue] = {}

    async def find(self, name: str) -> KnownQueue:
        """The queue of this name. Raises InvalidField or QueueNotFound."""
        try:
            return self._known[name]
        except (KeyError, TypeError):
            bare, account = read_name(name)
        parameters: dict[str, Any] = {"QueueName": bare}
        account = account or self.client.account
        if account is not None:
            parameters["QueueOwnerAWSAccountId"] = account
        answer = await self.client.call("get_queue_url", name, **parameters)
        return self._known.setdefault(name, KnownQueue(name, answer["QueueUrl"]))

    def learn(self, name: str, url: str) -> KnownQueue:
        """Caches a queue that was created just now: GetQueueUrl may not find it yet."""
        self._known[name] = KnownQueue(name, url)
        return self._known[name]

    def forget(self, name: str) -> None:
        """Drops the queue of this name: it is gone, or may have been created again."""
        self._known.pop(name, None)

    async def call(
        self, action: str, queue: KnownQueue, wait_s: int = 0, **parameters: Any
    ) -> Mapping[str, Any]:
        """Sends a request about a queue and returns its answer. Raises PenstockError."""
        try:
            return await self.client.call(
                action, queue.name, wait_s, QueueUrl=queue.url, **parameters
            )
        except QueueNotFound:
            self.forget(queue.name)
            raise no_queue(queue.name) from None

    async def attributes(self, queue: KnownQueue, *names: str) -> Mapping[str, str]:
        """Some attributes of a queue, as they are now."""
        answer = await self.call("get_queue_attributes", queue, AttributeNames=list(names))
        attributes: Mapping[str, str] = answer.get("Attributes", {})
        return attributes

    async def info(self, queue: KnownQueue) -> QueueInfo:
        """A queue's settings and dates but for its annotations, at most a minute old."""
        if queue.info is not None:
            return queue.info
        return self._keep(queue, await self._all(queue), {})

    async def described(self, queue: KnownQueue) -> QueueInfo:
        """A queue's settings and dates, as they are now."""
        attributes = await self._all(queue)
        tags = await self.call("list_queue_tags", queue)
        return self._keep(queue, attributes, tags.get("Tags") or {})

    def _keep(
        self, queue: KnownQueue, attributes: Mapping[str, str], tags: Mapping[str, str]
    ) -> QueueInfo:
        info = info_of(queue.name, attributes, tags)
        queue.keep_info(info)
        return info

    async def _all(self, queue: KnownQueue) -> Mapping[str, str]:
        attributes = await self.attributes(queue, "All")
        queue.arn = attributes.get(_ARN)
        return attributes

    async def arn(self, queue: KnownQueue) -> str:
        """A queue's ARN, which never changes."""
        if queue.arn is None:
            queue.arn = (await self.attributes(queue, _ARN)).get(_ARN, "")
        return queue.arn

    def source_of(self, queue: KnownQueue, received: Mapping[str, Any]) -> str | None:
        """The queue that a received message was dead-lettered from."""
        arn = received.get("Attributes", {}).get("DeadLetterQueueSourceArn")
        own = read_arn(queue.arn)
        return None if arn is None else name_of(arn, "" if own is None else own.owner.account)

    async def sources(self, queue: KnownQueue) -> list[str]:
        """The queues that name this one as their dead-letter queue; the first page of them."""
        answer = await self.call("list_dead_letter_source_queues", queue)
        return [_name_in(url) for url in answer.get("queueUrls", [])]

    async def names(self, prefix: str) -> list[str]:
        """The names that begin with the prefix, sorted."""
        legal = _PREFIX.match(prefix)
        parameters: dict[str, Any] = {"MaxResults": PAGE_MAX}
        if legal is not None and legal[0]:
            parameters["QueueNamePrefix"] = legal[0]
        names: set[str] = set()
        while True:
            answer = await self.client.call("list_queues", **parameters)
            names |= {_name_in(url) for url in answer.get("QueueUrls", [])}
            token = answer.get("NextToken")
            if not token:
                return sorted(name for name in names if name.startswith(prefix))
            parameters["NextToken"] = token


def _name_in(url: str) -> str:
    return urlsplit(url).path.rpartition("/")[2]
