"""A Redis Cluster: which server has which slot, learned from any node and from redirections."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from redis import exceptions as faults
from redis.crc import key_slot

from penstock.backends.redis.address import HostPort, RedisTarget
from penstock.backends.redis.link import (
    RedisCommand,
    RedisConnection,
    Server,
    is_temporary,
    load_scripts,
    send_until_done,
)
from penstock.errors import BackendLost, UnavailableError

_REDIRECTIONS_MAX: Final = 16
_PAUSE_S: Final = 0.05
# A node that has not answered for so long may be gone: another one is asked too.
_NEXT_NODE_S: Final = 0.1


class ClusterLink:
    """The servers of a cluster by address, and the address that has each slot."""

    def __init__(self, target: RedisTarget) -> None:
        self._target = target
        self._servers: dict[HostPort, Server] = {}
        self._slots: dict[int, HostPort] = {}
        self._learning: asyncio.Task[None] | None = None

    async def send(self, key: str, commands: Sequence[RedisCommand]) -> list[Any]:
        """The replies; see RedisLink. All keys of the commands must be in one slot."""
        slot = key_slot(key.encode())
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._target.timeout_s
        if slot not in self._slots:
            await self._learn()
        replies = await self._send(slot, commands)
        while again := [place for place, reply in enumerate(replies) if is_temporary(reply)]:
            # While a slot is being moved, no script can run in it: its keys are on two servers.
            if loop.time() + _PAUSE_S >= give_up_s:
                break
            await asyncio.sleep(_PAUSE_S)
            fresh = await self._send(slot, [commands[place] for place in again])
            for place, reply in zip(again, fresh, strict=True):
                replies[place] = reply
        return replies

    async def _send(self, slot: int, commands: Sequence[RedisCommand]) -> list[Any]:
        try:
            replies = await send_until_done(self._target, lambda: self._server_of(slot), commands)
        except UnavailableError:
            # The server may be gone, and another one may have its slots now.
            self._slots.clear()
            raise
        return await self._redirected(slot, commands, replies)

    async def _redirected(
        self, slot: int, commands: Sequence[RedisCommand], replies: list[Any]
    ) -> list[Any]:
        """Sends commands again whose slot is on another server: they have not been executed."""
        for _ in range(_REDIRECTIONS_MAX):
            moved = [place for place, reply in enumerate(replies) if _redirection(reply)]
            if not moved:
                break
            kind, where = _redirection(replies[moved[0]]) or ("", self._target.hosts[0])
            again = [commands[place] for place in moved]
            if kind == "ASK":
                server = self._server(where)
                asked = [each for command in again for each in (("ASKING",), command)]
                fresh = (await server.send(asked))[1::2]
                if any(isinstance(reply, faults.NoScriptError) for reply in fresh):
                    await load_scripts(server)
                    fresh = (await server.send(asked))[1::2]
            else:
                self._slots[slot] = where
                fresh = await send_until_done(self._target, lambda: self._server_of(slot), again)
            for place, reply in zip(moved, fresh, strict=True):
                replies[place] = reply
        return replies

    async def find(self, key: str) -> HostPort:
        """The address of the server that has this key; see RedisLink."""
        slot = key_slot(key.encode())
        if slot not in self._slots:
            await self._learn()
        return self._slots.get(slot, self._target.hosts[0])

    async def listen(self, key: str) -> RedisConnection:
        """A connection of its own to the server that has this key; see RedisLink."""
        return await self._server(await self.find(key)).connect()

    def _server_of(self, slot: int) -> Server:
        return self._server(self._slots.get(slot, self._target.hosts[0]))

    def _server(self, address: HostPort) -> Server:
        server = self._servers.get(address)
        if server is None:

            async def find() -> HostPort:
                return address

            server = self._servers[address] = Server(self._target, find)
        return server

    async def _learn(self) -> None:
        """Reads the map of the slots; callers at the same time share one request."""
        if self._learning is None or self._learning.done():
            self._learning = asyncio.get_running_loop().create_task(self._ask_slots())
        await asyncio.shield(self._learning)

    async def _ask_slots(self) -> None:
        """Asks one node after another, without waiting long for one that may be gone."""
        addresses = deque(dict.fromkeys([*self._target.hosts, *self._servers]))
        loop = asyncio.get_running_loop()
        asked: set[asyncio.Task[None]] = set()
        error: Exception | None = None
        try:
            while addresses or asked:
                if addresses:
                    asked.add(loop.create_task(self._ask_slots_of(addresses.popleft())))
                done, asked = await asyncio.wait(
                    asked,
                    timeout=_NEXT_NODE_S if addresses else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for answer in done:
                    try:
                        return answer.result()
                    except UnavailableError as lost:
                        error = lost
        finally:
            for task in asked:
                task.cancel()
        raise error or BackendLost(f"{self._target.shown}: no node of the cluster answers")

    async def _ask_slots_of(self, address: HostPort) -> None:
        """Notes the map of the slots that one node has. Raises UnavailableError."""
        (reply,) = await self._server(address).send([("CLUSTER", "SLOTS")])
        if isinstance(reply, faults.RedisError):
            raise BackendLost(f"{self._target.shown}: {reply}")
        for low, high, (host, port, *_), *_ in reply:
            # An empty host means the server that replied.
            where = (host.decode() if host else address[0], int(port))
            self._slots.update(dict.fromkeys(range(low, high + 1), where))

    async def close(self) -> None:
        """Ends every connection."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
        for server in self._servers.values():
            await server.close()


def _redirection(reply: Any) -> tuple[str, HostPort] | None:
    if not isinstance(reply, faults.ResponseError):
        return None
    # MovedError first: in redis-py it is a subclass of AskError.
    if isinstance(reply, faults.MovedError):
        return "MOVED", (reply.host, int(reply.port))
    if isinstance(reply, faults.AskError):
        return "ASK", (reply.host, int(reply.port))
    words = str(reply).split()
    if len(words) != 3 or words[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = words[2].rpartition(":")
    return words[0], (host, int(port))
