"""The queues in one Redis: calls scripts, and finds, creates and configures queues.

Queues that were read are cached. Every reply of a script has the queue's number and the version of
its settings, so a change by another process is noticed with the next command. The names of all
queues are in one sorted set, which may be in another slot than a queue: a name is added before its
queue is made and removed after it, so the set may contain names without a queue, but has every
queue's name.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from redis import exceptions as faults

from penstock.backends.redis.address import RedisTarget
from penstock.backends.redis.layout import QUEUE_BITS, PlainItem, RedisQueue, keys_of, redis_queue
from penstock.backends.redis.link import Packed, RedisCommand, RedisLink, checked_reply, packed
from penstock.backends.redis.scripts import SCRIPTS
from penstock.clock import Clock
from penstock.core.receipts import KEY_BYTES
from penstock.errors import (
    BackendLost,
    InvalidField,
    Overloaded,
    QueueExists,
    QueueNotFound,
    RequestError,
)
from penstock.service import (
    QUEUES_LIMIT_MAX,
    ConfigureQueue,
    CreateQueue,
    DescribeQueues,
    ListQueues,
    QueueInfo,
    QueueSettings,
    changed_settings,
    check_name,
    check_number,
    check_unused,
)

# The first version in which scripts have flags.
VERSION_MIN: Final = 7
_INFO: Final = re.compile(r"^(\w+):(.*?)\r?$", re.MULTILINE)
_KNOWN_MAX: Final = 10_000
_ATTEMPTS_MAX: Final = 20
_PAGE: Final = 1_000
_FIELDS: Final = (
    "number",
    "version",
    "secret",
    "settings",
    "created_at_ms",
    "configured_at_ms",
)
# The settings that scripts read, each a field of meta of its own.
_READ_BY_SCRIPTS: Final = (
    "visibility_ms",
    "delay_ms",
    "wait_ms",
    "retention_ms",
    "body_bytes_max",
    "messages_max",
    "bytes_max",
    "in_flight_max",
    "priority_age_ms",
    "dead_letter",
    "max_receives",
    "fifo",
    "dedup_by_content",
    "dedup_per_group",
    "paused",
)


class RedisQueues:
    """Every queue under one prefix."""

    def __init__(self, link: RedisLink, target: RedisTarget, clock: Clock | None) -> None:
        self.target = target
        self._link = link
        self._clock = clock
        self._known: dict[str, RedisQueue] = {}
        # Called with a queue that no longer exists.
        self.gone: Callable[[RedisQueue], None] = _nothing
        self._names = f"{target.prefix}:queues"
        self.channel = f"{target.prefix}:wake:"
        # The arguments that every script has after the time.
        self._shared = packed(target.history_max, self.channel)

    async def check_server(self) -> None:
        """Raises RequestError if the server is too old, or evicts keys; UnavailableError."""
        commands = [("INFO", "server"), ("INFO", "memory")]
        replies = await self._link.send(self._names, commands)
        if any(isinstance(reply, faults.NoPermissionError) for reply in replies):
            return
        text = b"\n".join(checked_reply(self.target, reply) for reply in replies).decode()
        info = dict(_INFO.findall(text))
        version = info.get("redis_version", "")
        major = version.partition(".")[0]
        if major.isdigit() and int(major) < VERSION_MIN:
            raise RequestError(
                f"{self.target.shown}: this is Redis {major}; {VERSION_MIN}.0 or later is needed"
            )
        policy = info.get("maxmemory_policy", "")
        is_limited = info.get("maxmemory", "0") != "0"
        # The other policies evict only keys with a time to live, and queues have none.
        if is_limited and policy.startswith("allkeys") and not self.target.evictable:
            raise RequestError(
                f"{self.target.shown}: this Redis has the maxmemory-policy {policy}, by which it "
                "removes whole queues when its maxmemory is reached; set maxmemory-policy "
                "noeviction there, or accept the loss with evictable=1 in the URL"
            )

    # Calling scripts.

    def now(self) -> int | str:
        """The time for a script: that of the clock that was given, or "" for that of Redis."""
        return "" if self._clock is None else self._clock.now_ms()

    async def run(self, script: str, keys: tuple[str, ...], *arguments: Any) -> Any:
        """The reply of a script, on the queue with these keys. Raises UnavailableError."""
        (reply,) = await self.run_all(keys, [(script, arguments)])
        return checked_reply(self.target, reply)

    async def run_all(
        self, keys: tuple[str, ...], calls: Sequence[tuple[str, Sequence[Any]]]
    ) -> list[Any]:
        """The replies of several scripts on one queue, one after another, in one pipeline.

        An error that a script met is in its reply's place. Raises UnavailableError.
        """
        commands = [
            (_call_of(script, keys), self.now(), self._shared, *arguments)
            for script, arguments in calls
        ]
        return await self.send(keys[0], commands)

    async def send(self, key: str, commands: list[RedisCommand]) -> list[Any]:
        """The replies to calls of scripts on the queue with this key; see `run_all`."""
        replicas = self.target.replicas
        if replicas:
            commands.append(("WAIT", replicas, round(self.target.timeout_s * 500)))
        replies = await self._link.send(key, commands)
        if replicas and checked_reply(self.target, replies.pop()) < replicas:
            raise BackendLost(
                f"{self.target.shown}: executed, but fewer than {replicas} replicas confirmed it "
                "in time"
            )
        return replies

    def plain_push(self, queue: RedisQueue, item: PlainItem) -> RedisCommand:
        """The call of `push_plain.lua` with a message."""
        keys = queue.keys if self.target.scheme == "redis+cluster" else queue.keys[:1]
        message = Packed(b"".join((*item, b"\r\n")), 1)
        call = _call_of("push_plain", keys), message, queue.identity
        retention_ms = queue.info.settings.retention_ms
        if self._clock is None:
            return (*call, retention_ms)
        return (*call, retention_ms, self._clock.now_ms())

    async def run_on(self, queue: RedisQueue, script: str, *arguments: Any) -> list[Any]:
        """The reply of a script on a queue. Raises QueueNotFound, UnavailableError."""
        return self.checked(queue, await self.run(script, queue.keys, *arguments))

    def checked(self, queue: RedisQueue, reply: Any) -> list[Any]:
        """The reply of a script on a queue. Raises QueueNotFound if there was no such queue."""
        if reply is None:
            self.forget(queue.name)
            self.gone(queue)
            raise self._not_found(queue.name)
        answer: list[Any] = reply
        if answer[0] != queue.identity:
            self.forget(queue.name)
        return answer

    # Finding queues.

    def _not_found(self, name: str) -> QueueNotFound:
        return QueueNotFound(f"queue: there is no queue {name!r}; create it first")

    def forget(self, name: str) -> None:
        """Drops a queue from the cache: it is read again when it is next needed."""
        self._known.pop(name, None)

    def known(self, name: object) -> RedisQueue | None:
        """The queue of this name as it was last read; None if it was not."""
        return self._known.get(name) if type(name) is str else None

    async def find(self, name: object) -> RedisQueue:
        """The queue of this name as it was last read. Raises InvalidField or QueueNotFound."""
        try:
            return self._known[name]  # type: ignore[index]
        except (KeyError, TypeError):
            return await self.read(check_name(name))

    async def read(self, name: str) -> RedisQueue:
        """The queue of this name as it is now. Raises InvalidField or QueueNotFound."""
        (queue,) = await self._read_all([check_name(name)])
        if queue is None:
            self.forget(name)
            raise self._not_found(name)
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[name] = queue
        return queue

    async def read_if_exists(self, name: str) -> RedisQueue | None:
        """The queue of this name as it is now, or None."""
        try:
            return await self.read(name)
        except QueueNotFound:
            return None

    async def same_as(self, queue: RedisQueue, reply: Sequence[Any]) -> RedisQueue:
        """The queue of a reply: another one, if it was removed and created again meanwhile."""
        if reply[0].partition(b":")[0] == queue.identity.partition(b":")[0]:
            return queue
        return await self.read(queue.name)

    async def _read_all(self, names: Sequence[str]) -> list[RedisQueue | None]:
        all_keys = [keys_of(self.target.prefix, name) for name in names]
        reads = [self._link.send(keys[0], [("HMGET", keys[0], *_FIELDS)]) for keys in all_keys]
        # `gather` needs an event loop, and `blocking` runs this without one for a single queue.
        found = [await reads[0]] if len(reads) == 1 else await asyncio.gather(*reads)
        queues: list[RedisQueue | None] = []
        has_history = self.target.history_max > 0
        for name, keys, (reply,) in zip(names, all_keys, found, strict=True):
            number, version, secret, settings, created, configured = checked_reply(
                self.target, reply
            )
            if number is None:
                queues.append(None)
                continue
            info = QueueInfo(
                name,
                msgspec.json.decode(settings, type=QueueSettings),
                int(created),
                int(configured),
            )
            queues.append(redis_queue(info, keys, int(number), int(version), secret, has_history))
        return queues

    # Commands.

    async def create(self, command: CreateQueue) -> QueueInfo:
        """Makes a queue, and its dead-letter queue if that is missing. Raises RequestError."""
        name = check_name(command.queue)
        existing = await self.read_if_exists(name)
        if existing is not None:
            return _unchanged(existing, command.settings)
        settings = changed_settings(QueueSettings(), command.settings)
        made = await self._make_dead_letter(name, settings)
        if not await self._make(name, settings):
            # Another process has created it meanwhile.
            return _unchanged(await self.read(name), command.settings)
        info = (await self.read(name)).info
        return msgspec.structs.replace(info, also_created=made)

    async def _make(self, name: str, settings: QueueSettings) -> bool:
        keys = keys_of(self.target.prefix, name)
        (added,) = await self._link.send(self._names, [("ZADD", self._names, 0, name)])
        checked_reply(self.target, added)
        number = secrets.randbits(QUEUE_BITS - 1) + 1
        made: int = await self.run(
            "create",
            keys,
            *("number", number, "secret", secrets.token_bytes(KEY_BYTES)),
            *_fields_of(settings),
        )
        return made == 1

    async def _make_dead_letter(self, name: str, settings: QueueSettings) -> list[str]:
        dead = settings.dead_letter
        if dead is None:
            return []
        if dead == name:
            raise InvalidField(f"dead_letter: {name!r} cannot be its own dead-letter queue")
        target = await self.read_if_exists(dead)
        if target is None:
            return [dead] if await self._make(dead, QueueSettings(fifo=settings.fifo)) else []
        if target.info.settings.fifo != settings.fifo:
            raise InvalidField(f"dead_letter: {name!r} and {dead!r} must both be fifo, or neither")
        return []

    async def configure(self, command: ConfigureQueue) -> QueueInfo:
        """Changes the named settings. Raises RequestError."""
        for _ in range(_ATTEMPTS_MAX):
            queue = await self.read(command.queue)
            before = queue.info.settings
            settings = changed_settings(before, command.settings)
            if settings.fifo != before.fifo:
                raise InvalidField(
                    f"fifo: {queue.name!r} cannot be changed to or from fifo; make a new queue"
                )
            if settings == before:
                return queue.info
            made = await self._make_dead_letter(queue.name, settings)
            counts = _without_notes(settings) != _without_notes(before)
            reply = await self.run_on(
                queue, "configure", queue.identity, int(counts), *_fields_of(settings)
            )
            if reply[3]:
                info = (await self.read(queue.name)).info
                return msgspec.structs.replace(info, also_created=made)
        raise Overloaded(f"queue: {command.queue!r} is being configured by others; try again")

    async def check_unused(self, queue: RedisQueue) -> None:
        """Raises QueueInUse if other queues send their dead letters to this one."""
        sources = [
            info.queue
            for info in await self.describe_all(DescribeQueues(limit=2**31))
            if info.settings.dead_letter == queue.name and info.queue != queue.name
        ]
        check_unused(queue.name, sources)

    async def drop_name(self, name: str) -> None:
        """Takes the name of a removed queue from the list of names."""
        await self._link.send(self._names, [("ZREM", self._names, name)])
        self.forget(name)
        if await self.read_if_exists(name) is not None:
            # Another process has just created it again.
            await self._link.send(self._names, [("ZADD", self._names, 0, name)])

    async def describe_all(self, command: ListQueues | DescribeQueues) -> list[QueueInfo]:
        """The queues of these names, in order. Raises InvalidField."""
        check_number("limit", command.limit, 1, QUEUES_LIMIT_MAX)
        prefix, after = command.prefix, command.after
        if type(prefix) is not str or type(after) is not str:
            raise InvalidField("prefix, after: expected text")
        infos: list[QueueInfo] = []
        while len(infos) < command.limit:
            names = await self._names_after(prefix, after)
            found = await self._read_all(names)
            infos += [queue.info for queue in found if queue is not None]
            if len(names) < _PAGE:
                break
            after = names[-1]
        return infos[: command.limit]

    async def _names_after(self, prefix: str, after: str) -> list[str]:
        low = f"({after}" if after >= prefix else f"[{prefix}"
        # Names are ASCII, so every name with this prefix sorts before the prefix and this byte.
        high = b"[" + prefix.encode(errors="replace") + b"\xff"
        (reply,) = await self._link.send(
            self._names,
            [("ZRANGEBYLEX", self._names, low.encode(errors="replace"), high, "LIMIT", 0, _PAGE)],
        )
        return [name.decode() for name in checked_reply(self.target, reply)]


@lru_cache(maxsize=_KNOWN_MAX)
def _call_of(script: str, keys: tuple[str, ...]) -> Packed:
    """The beginning of every call of a script on a queue."""
    return packed("EVALSHA", SCRIPTS[script].sha, len(keys), *keys)


def _unchanged(queue: RedisQueue, given: dict[str, Any]) -> QueueInfo:
    """The existing queue. Raises QueueExists if it has other settings."""
    before = queue.info.settings
    settings = changed_settings(before, given)
    if settings == before:
        return queue.info
    difference = ", ".join(
        f"{name} is {getattr(before, name)!r}, asked for {getattr(settings, name)!r}"
        for name in QueueSettings.__struct_fields__
        if getattr(before, name) != getattr(settings, name)
    )
    fixed = settings.fifo != before.fifo
    raise QueueExists(
        f"queue: {queue.name!r} exists with other settings ({difference}); "
        + ("use another name" if fixed else "configure it instead")
    )


def _fields_of(settings: QueueSettings) -> list[Any]:
    fields: list[Any] = ["settings", msgspec.json.encode(settings)]
    for name in _READ_BY_SCRIPTS:
        value = getattr(settings, name)
        fields += (name, "" if value is None else int(value) if type(value) is bool else value)
    return fields


def _without_notes(settings: QueueSettings) -> QueueSettings:
    """The settings without notes: annotations whose name begins with a dot."""
    public = {name: text for name, text in settings.annotations.items() if name[0] != "."}
    return msgspec.structs.replace(settings, annotations=public)


def _nothing(queue: RedisQueue) -> None:
    pass
