"""The replicated log on NATS JetStream: one stream per shard, one of registers, one of chunks.

    stream           subjects          holds
    NAME_shard_N     NAME.shard.N      the slots of shard N; a slot is a message's sequence
    NAME_registers   NAME.register.>   the last message of each subject; a revision is its sequence
    NAME_chunks      NAME.chunk.>      parts of snapshots: NAME.chunk.SHARD.SNAPSHOT.INDEX

All of them are stored in files on `replicas` servers, without limits: a full stream must refuse
messages, and never discard the oldest. The servers must run with `sync_interval: always`; without
it, a power cut can lose changes that were confirmed to clients.

Appends are fenced by `Nats-Expected-Last-Sequence`. The header that expects a message id is not
used: one mismatch halts a replicated stream (2.14.6, 2.15.1).
"""

import asyncio
import base64
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from penstock.cluster.address import ClusterAddress
from penstock.cluster.log import (
    Append,
    Bounds,
    Demote,
    DropChunks,
    LogFull,
    LogRequest,
    LogSlot,
    LogSteps,
    Mismatch,
    Pause,
    PurgeSlots,
    PutChunk,
    ReadChunk,
    ReadRegister,
    ReadRegisters,
    ReadSlots,
    Register,
    SlotBounds,
    Swap,
    Unanswered,
)
from penstock.errors import BackendLost, StoreUnusable
from penstock.steps import await_steps
from penstock.url import why_not_connected

T = TypeVar("T")
_WRONG_LAST: Final = 10071
# No room: the server's limit of storage, that of the account, or that of the stream.
_FULL: Final = frozenset({10023, 10047, 10002, 10028, 10077, 10122})
_NOT_FOUND: Final = 404
# A request without an answer for so long was lost, probably when the stream's leader changed.
_TIMEOUT_S: Final = 2.0
# An append is repeated sooner: the shard waits for it, and the same append is never stored twice.
_APPEND_S: Final = 0.5
# The longest wait for a stream's new leader, the timeout of one request to it, and the pause.
_LEADER_S: Final = 0.5
_LEADER_ASK_S: Final = 0.02
_LEADER_PAUSE_S: Final = 0.005
# For how long after a change of the leader an append may be lost, and is repeated sooner still.
_UNSTABLE_S: Final = 1.0
_UNSTABLE_APPEND_S: Final = 0.1
_CREATE_S: Final = 60.0
# Three attempts at three servers that do not answer, 2 s each.
_CONNECT_S: Final = 20.0
_RETRY_S: Final = 0.2
_READ_BYTES_MAX: Final = 16 * 1024 * 1024
# For how long only the stream's leader is read after a damaged replica was found.
_BY_LEADER_S: Final = 10.0
_NO_LIMITS: Final = {
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_consumers": -1,
    "retention": "limits",
    "storage": "file",
    "discard": "new",
    "allow_direct": True,
}
# The error for a stream that exists with other settings, which an operator may have chosen.
_OTHER_SETTINGS: Final = 10058
_INFOS_MAX: Final = 4
_encode_json = msgspec.json.encode
_decode_json = msgspec.json.decode


def _check_stream(stream: str, info: dict[str, Any]) -> None:
    """Raises StoreUnusable if a stream that exists would lose messages, or refuse reads.

    Replicas, placement and compression are for the operator to choose, and so is a limit at which
    a stream refuses new messages.
    """
    config = info["config"]
    discards = config.get("discard") == "old"
    is_unsafe = {
        "max_msgs": discards and config.get("max_msgs", -1) > 0,
        "max_bytes": discards and config.get("max_bytes", -1) > 0,
        "max_age": config.get("max_age", 0) > 0,
        "retention": config.get("retention") != "limits",
        "allow_direct": not config.get("allow_direct"),
    }
    for name, is_so in is_unsafe.items():
        if is_so:
            raise StoreUnusable(
                f"the stream {stream} exists with {name}={config.get(name)}; Penstock needs "
                f"{name}={_NO_LIMITS[name]}, or it would lose messages: edit or remove the stream"
            )


class _OneConnection(Client):
    """A client that closes the socket of a failed handshake before it connects again.

    nats-py leaves such a socket open until the garbage collector closes it with a warning.
    """

    async def _connect_to_server(self, server: Any) -> None:
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(server)


async def open_client(address: ClusterAddress, name: str) -> Client:
    """A connection to the NATS servers, which reconnects whenever it breaks.

    Raises BackendLost if none of them can be reached now.
    """
    options: dict[str, Any] = {}
    if address.uses_tls:
        options["tls"] = ssl.create_default_context(cafile=address.ca_file)
    if address.credentials_file:
        options["user_credentials"] = address.credentials_file
    last: list[Exception] = []
    untrusted = asyncio.Event()

    async def note_error(error: Exception) -> None:
        if not last or not isinstance(error, OSError):
            # The error that a server sent explains more than the closed socket that follows it.
            last[:] = [error]
        if isinstance(error, ssl.SSLError):
            untrusted.set()

    client = _OneConnection()
    connecting = asyncio.ensure_future(
        client.connect(
            list(address.servers),
            name=name,
            connect_timeout=2,
            reconnect_time_wait=0.05,  # type: ignore[arg-type]
            # Only for the first connection, which would otherwise be tried without end.
            max_reconnect_attempts=2,
            ping_interval=2,
            max_outstanding_pings=2,
            error_cb=note_error,
            allow_reconnect=True,
            pending_size=64 * 1024 * 1024,
            **options,
        )
    )
    giving_up = asyncio.ensure_future(untrusted.wait())
    both: list[asyncio.Future[Any]] = [connecting, giving_up]
    try:
        # nats-py does not return if it does not trust a server's certificate.
        await asyncio.wait(both, timeout=_CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            raise TimeoutError
        connecting.result()
    except (TimeoutError, OSError, nats.errors.Error) as error:
        shown = last[0] if last else error
        text = why_not_connected(shown) if isinstance(shown, OSError) else str(shown)
        cause = " ".join(text.split()) or type(shown).__name__
        raise BackendLost(f"{address.shown}: cannot be reached: {cause}") from error
    finally:
        for each in both:
            each.cancel()
        await asyncio.wait(both, timeout=1)
    client.options["max_reconnect_attempts"] = -1
    return client


class JetStream:
    """Executes the requests of `log` on JetStream streams whose names begin with `name`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._by_leader_until: dict[int, float] = {}
        self._unstable_until: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._answers: dict[type, Callable[[Any], Coroutine[Any, Any, Any]]] = {
            Append: self._append,
            ReadSlots: self._read_slots,
            Bounds: self._bounds,
            PurgeSlots: self._purge,
            Demote: self._demote,
            ReadRegister: self._read_register,
            ReadRegisters: self._read_registers,
            Swap: self._swap,
            PutChunk: self._put_chunk,
            ReadChunk: self._read_chunk,
            DropChunks: self._drop_chunks,
            Pause: self._pause,
        }

    async def execute(self, request: LogRequest[T]) -> T:
        """Executes the request. Raises Mismatch or Unanswered."""
        try:
            return cast(T, await self._answers[type(request)](request))
        except nats.errors.NoRespondersError as error:
            raise Unanswered(
                f"{type(request).__name__}: no NATS server takes it: the stream has no leader, or "
                "JetStream is disabled"
            ) from error
        except (TimeoutError, nats.errors.Error, OSError) as error:
            reason = str(error) or "no answer from NATS"
            raise Unanswered(f"{type(request).__name__}: {reason}") from error

    async def run(self, steps: LogSteps[T]) -> T:
        """Runs steps to their end. Raises what they raise."""
        return await await_steps(self.execute, steps)

    async def close(self) -> None:
        """Ends the connection."""
        await self._client.close()

    # Streams.

    async def prepare(self, shards: int, replicas: int) -> None:
        """Creates the streams of shards and chunks that do not exist. Raises StoreUnusable."""
        await self._create("chunks", "chunk.>", replicas, max_msgs_per_subject=1, discard="old")
        for shard in range(shards):
            await self._create(f"shard_{shard}", f"shard.{shard}", replicas)

    async def prepare_registers(self, replicas: int) -> None:
        """Creates the stream of registers if it does not exist. Raises StoreUnusable."""
        # One message per subject: discarding the old message replaces the value of a register.
        await self._create(
            "registers", "register.>", replicas, max_msgs_per_subject=1, discard="old"
        )

    async def _create(self, kind: str, subject: str, replicas: int, **more: Any) -> None:
        stream = f"{self._name}_{kind}"
        config = {
            "name": stream,
            "subjects": [f"{self._name}.{subject}"],
            "num_replicas": replicas,
            **_NO_LIMITS,
            **more,
        }
        give_up = self._loop.time() + _CREATE_S
        while True:
            try:
                reply = await self._api(f"STREAM.CREATE.{stream}", config)
            except (TimeoutError, nats.errors.Error, OSError) as error:
                reply = {"error": {"code": 503, "description": str(error) or "no answer"}}
            refused = reply.get("error")
            if refused is None:
                return
            if refused.get("err_code") == _OTHER_SETTINGS:
                with suppress(TimeoutError, Unanswered, nats.errors.Error):
                    _check_stream(stream, await self._checked_api(f"STREAM.INFO.{stream}"))
                    return
            if self._loop.time() > give_up:
                raise StoreUnusable(
                    f"the stream {stream} with {replicas} replicas cannot be created: "
                    f"{refused.get('description')}"
                )
            await asyncio.sleep(_RETRY_S)

    async def _api(
        self, subject: str, body: Any = None, timeout_s: float = _TIMEOUT_S
    ) -> dict[str, Any]:
        payload = b"" if body is None else _encode_json(body)
        answer = await self._client.request(f"$JS.API.{subject}", payload, timeout=timeout_s)
        return cast("dict[str, Any]", _decode_json(answer.data))

    async def _checked_api(self, subject: str, body: Any = None) -> dict[str, Any]:
        reply = await self._api(subject, body)
        if "error" in reply:
            raise Unanswered(f"{subject}: {reply['error'].get('description')}")
        return reply

    async def stream_infos(self, shards: int) -> list[dict[str, Any]]:
        """What the leaders of some streams say of these, each with the time of its answer here.

        The leaders are on different servers, if these share the work.
        """
        infos: list[dict[str, Any]] = []
        for kind in (
            "registers",
            "chunks",
            *(f"shard_{n}" for n in range(min(shards, _INFOS_MAX))),
        ):
            with suppress(TimeoutError, Unanswered, nats.errors.Error, OSError):
                info = await self._checked_api(f"STREAM.INFO.{self._name}_{kind}")
                infos.append({**info, "answered_ms": time.time_ns() // 1_000_000})
        return infos

    async def move_leader_here(self, shard: int) -> None:
        """Moves the leader of the shard's stream to the server that this client is connected to."""
        stream = f"{self._name}_shard_{shard}"
        here = str(self._client._server_info.get("server_name"))
        try:
            info = await self._checked_api(f"STREAM.INFO.{stream}")
            cluster = info.get("cluster") or {}
            followers = [each["name"] for each in cluster.get("replicas") or ()]
            if here in followers:
                body = {"placement": {"preferred": here}}
                self._unstable_until[shard] = self._loop.time() + _UNSTABLE_S
                await self._api(f"STREAM.LEADER.STEPDOWN.{stream}", body)
                await self._wait_for_leader(stream, here)
        except (TimeoutError, Unanswered, nats.errors.Error, OSError):
            # The leader stays where it is: an append then takes one network hop more.
            return

    async def _wait_for_leader(self, stream: str, server: str) -> None:
        """Waits until this server answers as the leader of a stream, for at most `_LEADER_S`.

        An append to a stream without a leader is lost, and repeated only after a timeout.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEADER_S):
                while True:
                    # The old leader may still answer, or no server does.
                    with suppress(TimeoutError):
                        info = await self._api(f"STREAM.INFO.{stream}", timeout_s=_LEADER_ASK_S)
                        if (info.get("cluster") or {}).get("leader") == server:
                            return
                    await asyncio.sleep(_LEADER_PAUSE_S)

    # Publishing.

    async def _publish(
        self, subject: str, data: bytes, headers: dict[str, str], timeout_s: float = _TIMEOUT_S
    ) -> int:
        answer = await self._client.request(
            f"{self._name}.{subject}", data, timeout=timeout_s, headers=headers
        )
        reply = _decode_json(answer.data)
        error = reply.get("error")
        if error is None:
            return int(reply["seq"])
        if error.get("err_code") == _WRONG_LAST:
            raise Mismatch
        kind = LogFull if error.get("err_code") in _FULL else Unanswered
        raise kind(f"{subject}: NATS refused it: {error.get('description')}")

    async def _append(self, request: Append) -> int:
        headers = {"Nats-Expected-Last-Sequence": str(request.after)}
        is_unstable = self._unstable_until.get(request.shard, 0) > self._loop.time()
        timeout_s = _UNSTABLE_APPEND_S if is_unstable else _APPEND_S
        return await self._publish(f"shard.{request.shard}", request.extent, headers, timeout_s)

    async def _swap(self, request: Swap) -> int:
        headers = {"Nats-Expected-Last-Subject-Sequence": str(request.revision)}
        return await self._publish(f"register.{request.key}", request.value, headers)

    async def _put_chunk(self, request: PutChunk) -> None:
        subject = f"chunk.{request.shard}.{request.snapshot}.{request.index}"
        await self._publish(subject, request.data, {})

    # Reading.

    async def _direct_get(self, stream: str, body: Any) -> AsyncIterator[Msg]:
        """The messages that a direct get of several messages returns."""
        inbox = self._client.new_inbox()
        # A queue of our own: `Subscription.next_msg` starts a task for every message, and a log may
        # have millions of them to read.
        messages: asyncio.Queue[Msg] = asyncio.Queue()
        subscription = await self._client.subscribe(inbox, cb=messages.put)
        try:
            await self._client.publish(
                f"$JS.API.DIRECT.GET.{stream}", _encode_json(body), reply=inbox
            )
            while True:
                if messages.empty():
                    async with asyncio.timeout(_TIMEOUT_S):
                        message = await messages.get()
                else:
                    message = messages.get_nowait()
                status = (message.headers or {}).get("Status")
                if status == "503":
                    raise Unanswered(f"{stream}: no server answers")
                if status is not None:
                    return
                yield message
        finally:
            await subscription.unsubscribe()

    async def _read_slots(self, request: ReadSlots) -> list[LogSlot]:
        stream = f"{self._name}_shard_{request.shard}"
        if self._by_leader_until.get(request.shard, 0) > self._loop.time():
            return await self._read_by_leader(stream, request)
        body = {"seq": request.first, "batch": request.limit, "max_bytes": _READ_BYTES_MAX}
        return [
            LogSlot(_sequence(message), message.data)
            async for message in self._direct_get(stream, body)
        ]

    async def _read_by_leader(self, stream: str, request: ReadSlots) -> list[LogSlot]:
        slots: list[LogSlot] = []
        for number in range(request.first, request.first + min(request.limit, 50)):
            reply = await self._api(f"STREAM.MSG.GET.{stream}", {"seq": number})
            message = reply.get("message")
            if message is None:
                if reply["error"].get("code") != _NOT_FOUND:
                    raise Unanswered(f"{stream}: {reply['error'].get('description')}")
                break
            slots.append(LogSlot(number, base64.b64decode(message.get("data", ""))))
        return slots

    async def _bounds(self, request: Bounds) -> SlotBounds:
        info = await self._checked_api(f"STREAM.INFO.{self._name}_shard_{request.shard}")
        state = info["state"]
        return SlotBounds(max(1, state["first_seq"]), state["last_seq"])

    async def _purge(self, request: PurgeSlots) -> None:
        # The server keeps the message with this sequence. For a sequence after the last message it
        # would skip numbers.
        stream = f"{self._name}_shard_{request.shard}"
        await self._checked_api(f"STREAM.PURGE.{stream}", {"seq": request.before})

    async def _demote(self, request: Demote) -> None:
        stream = f"{self._name}_shard_{request.shard}"
        self._by_leader_until[request.shard] = self._loop.time() + _BY_LEADER_S
        await self._api(f"STREAM.LEADER.STEPDOWN.{stream}")

    async def _read_register(self, request: ReadRegister) -> Register | None:
        subject = f"{self._name}.register.{request.key}"
        message = await self._direct_last(f"{self._name}_registers", subject)
        if message is None:
            return None
        return Register(request.key, message.data, _sequence(message))

    async def _read_registers(self, request: ReadRegisters) -> list[Register]:
        start = f"{self._name}.register."
        body = {"multi_last": [f"{start}{request.prefix}>"]}
        return sorted(
            [
                Register(
                    (message.headers or {})["Nats-Subject"].removeprefix(start),
                    message.data,
                    _sequence(message),
                )
                async for message in self._direct_get(f"{self._name}_registers", body)
            ]
        )

    async def _read_chunk(self, request: ReadChunk) -> bytes | None:
        subject = f"{self._name}.chunk.{request.shard}.{request.snapshot}.{request.index}"
        message = await self._direct_last(f"{self._name}_chunks", subject)
        return None if message is None else message.data

    async def _direct_last(self, stream: str, subject: str) -> Msg | None:
        """The last message of a subject; None if it has none."""
        message = await self._client.request(
            f"$JS.API.DIRECT.GET.{stream}.{subject}", timeout=_TIMEOUT_S
        )
        status = (message.headers or {}).get("Status")
        if status is not None and int(status) != _NOT_FOUND:
            raise Unanswered(f"{stream}: status {status}")
        return message if status is None else None

    async def _drop_chunks(self, request: DropChunks) -> None:
        subject = f"{self._name}.chunk.{request.shard}.{request.snapshot}.*"
        await self._checked_api(f"STREAM.PURGE.{self._name}_chunks", {"filter": subject})

    async def _pause(self, request: Pause) -> None:
        await asyncio.sleep(request.ms / 1_000)


def _sequence(message: Msg) -> int:
    return int((message.headers or {})["Nats-Sequence"])
