"""The client of the frames: sharing a connection, losing it, and finding another."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

import penstock
from penstock.aio import AsyncQueues
from penstock.backends.portal import Portal
from penstock.backends.remote.asynchronous import AsyncRemote
from penstock.backends.remote.blocking import Remote
from penstock.backends.remote.endpoints import TcpEndpoint
from penstock.backends.remote.retry import is_repeatable, outcome_of_repeat, with_remaining_wait
from penstock.client import Queues
from penstock.errors import (
    BackendLost,
    EngineClosed,
    InvalidField,
    ProtocolError,
    QueueFull,
    QueueNotFound,
    StaleReceipt,
    UnsupportedOperation,
)
from penstock.service import (
    Batch,
    Claim,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueues,
    Extend,
    ListQueues,
    Pull,
    Purge,
    Push,
    PushMany,
    PushReply,
    Redrive,
    Release,
    Stats,
)
from penstock.wire.frames.bodies import decode_command, encode_claims
from penstock.wire.frames.frames import (
    CANCEL,
    KIND_OF,
    PULL,
    PULL_MESSAGES_MAX,
    Frame,
    FrameDecoder,
    Welcome,
    client_limits,
    encode_welcome,
    pack,
)
from tests.backends.engine.test_fork import result_in_child
from tests.interrupts import ends_in_time, points
from tests.ports import refusing_port
from tests.server.conftest import TIMEOUT_S, UnixEndpoint, until


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture
def remote(server):
    remote = Remote(server.endpoint)
    remote.execute(CreateQueue("orders"))
    yield remote
    remote.close()


@pytest.fixture
def queues(remote):
    return Queues(remote)


def in_thread(function):
    """Run it beside the test; what it gives or raises is in the future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


class SilentServer:
    """A server that sends a WELCOME; the test sends all other answers."""

    def __init__(self, directory):
        self.endpoint = UnixEndpoint(directory / "silent")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "silent"))
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)

    def accept(self, *, welcome=True, options=None):
        link, _ = self._listener.accept()
        link.settimeout(TIMEOUT_S)
        if welcome:
            link.sendall(encode_welcome(Welcome("silent", 10**6, 10, options or {})))
        return link

    def close(self):
        self._listener.close()


@pytest.fixture
def silent(tmp_path):
    server = SilentServer(tmp_path)
    yield server
    server.close()


def read_frames(link, count=1):
    """The next frames a client sends, after its hello."""
    decoder = FrameDecoder("client", {0x30: 4_096, **client_limits()})
    frames: list[Frame] = []
    while len(frames) < count + 1:
        frames += decoder.feed(link.recv(65_536) if not decoder.is_amid_frame else b"")
    return frames[1:]


def read_more_frames(link, decoder, count, kinds=None):
    """So many more frames, of these kinds: a client that has no answer for long also asks others.

    A decoder gives one batch of frames at a time, and the next without further bytes.
    """
    frames: list[Frame] = []
    data = b""
    while len(frames) < count:
        batch = decoder.feed(data)
        frames += [each for each in batch if kinds is None or each[0] in kinds]
        data = b"" if batch else link.recv(65_536)
    return frames


# Sharing a connection.


def test_many_threads_share_one_connection_and_get_their_own_answers(server, queues):
    def work(number):
        for step in range(50):
            body = b"%d/%d" % (number, step)
            queues.create(f"q{number}")
            queues.push(f"q{number}", body)
            claim = queues.pull(f"q{number}")
            assert claim.body == body
            assert queues.delete(claim) is True
        return number

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == list(range(16))
    assert server.frames.connections_seen == 1


def test_a_thread_that_waits_reads_for_the_others(queues):
    waiting = [in_thread(lambda: queues.pull("orders", wait=60)) for _ in range(5)]
    until(lambda: queues.stats("orders").waiting_pulls == 5)
    for number in range(200):
        queues.push("orders", b"%d" % number, delay=3_600)
    for _ in range(5):
        queues.push("orders", b"now")
    claims = [each.result(TIMEOUT_S) for each in waiting]
    assert len({claim.id for claim in claims}) == 5


def test_an_answer_of_many_megabytes_arrives_whole(queues):
    body = os.urandom(8 * 1024 * 1024)
    queues.create("large", max_body_bytes=16 * 1024 * 1024)
    queues.push("large", body)
    assert queues.pull("large").body == body


def test_a_pull_gives_as_many_as_were_asked_for_whatever_one_answer_holds(remote, queues):
    bodies = [b"%d" % number for number in range(5_000)]
    remote.execute(PushMany("orders", bodies))
    claims = queues.pull_many("orders", 4_500)
    assert [claim.body for claim in claims] == bodies[:4_500]
    # No wait behind the first answer, and the last pull finds nothing.
    assert [claim.body for claim in queues.pull_many("orders", 4_500, wait=600)] == bodies[4_500:]
    queues.delete_many(claims)
    large = [bytes([number]) * 1_000_000 for number in range(12)]
    queues.push_many("orders", large)
    assert [claim.body for claim in queues.pull_many("orders", 12)] == large


def test_a_pull_with_an_attempt_id_gives_what_one_answer_holds_and_the_same_again(remote, queues):
    remote.execute(PushMany("orders", [b"x"] * 3_000))
    first = queues.pull_many("orders", 3_000, attempt_id="a")
    assert len(first) == PULL_MESSAGES_MAX
    assert queues.pull_many("orders", 3_000, attempt_id="a") == first


def test_a_pull_whose_rest_is_refused_gives_what_it_has(remote, queues):
    queues.create("few", max_in_flight=2_500)
    remote.execute(PushMany("few", [b"x"] * 4_000))
    assert len(queues.pull_many("few", 4_000)) == 2_500


def test_a_pull_of_few_small_messages_is_one_request(server, remote, queues):
    queues.push_many("orders", [b"x"] * 5)
    before = server.frames.requests_seen
    assert len(queues.pull_many("orders", 10)) == 5
    assert server.frames.requests_seen == before + 1


def test_a_bulk_push_accepts_or_refuses_each_message_alone(remote, queues):
    queues.create("small", max_messages=2, max_body_bytes=10)
    bulk = PushMany(queue="small", bodies=[b"a", b"x" * 11, b"b", b"c"], dedup_ids=None)
    replies = remote.execute(bulk)
    assert [type(each) for each in replies][::2] == [PushReply, PushReply]
    assert isinstance(replies[3], QueueFull)
    assert [claim.body for claim in queues.pull_many("small", 9)] == [b"a", b"b"]


def test_a_bulk_push_carries_every_option_by_row(remote, queues):
    bulk = PushMany(
        queue="orders",
        bodies=[b"a", b"b", b"c"],
        priority=1,
        attributes={"shared": "yes", "raw": b"\xff"},
        priorities=[None, 9, None],
        groups=["g", None, None],
        dedup_ids=["1", "2", "1"],
        each_attributes=[None, {"own": b"\x00"}, None],
    )
    first, second, third = remote.execute(bulk)
    assert third == PushReply(first.id, first.sequence, True)
    b, a = queues.pull_many("orders", 10)
    assert (b.id, b.body, b.priority, b.attributes) == (second.id, b"b", 9, {"own": b"\x00"})
    assert (a.body, a.priority, a.group) == (b"a", 1, "g")
    assert a.attributes == {"shared": "yes", "raw": b"\xff"}


def test_the_server_reports_its_status(remote):
    assert remote.status()["connections"] == 1


def test_connecting_loads_neither_asyncio_nor_tls():
    code = "import sys, penstock.backends.remote.open; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"asyncio", "ssl"} & set(done.stdout.split())


# Losing the connection.


def test_what_may_be_done_twice_and_what_may_not():
    push = Push("q", b"")
    named = Push("q", b"", dedup_id="1")
    safe: list[object] = [
        named,
        Pull("q"),
        Delete("q", "r"),
        Extend("q", "r", 1),
        Release("q", "r"),
        Stats("q"),
    ]
    safe += [CreateQueue("q"), ListQueues(), Batch([named, Delete("q", "r")]), Batch([])]
    safe += [PushMany(queue="q", bodies=[b""], dedup_ids=["1"])]
    unsafe: list[object] = [push, Purge("q"), Redrive("q"), DeleteQueue("q"), Batch([named, push])]
    unsafe += [PushMany(queue="q", bodies=[b"", b""], dedup_ids=["1", None])]
    assert all(map(is_repeatable, safe))
    assert not any(map(is_repeatable, unsafe))


def test_a_pull_that_is_sent_again_asks_for_the_same_but_waits_less():
    pull = Pull("q", 3, 1_000, 60_000, "attempt", "holder", 4_096, True)
    again = with_remaining_wait(pull, 10)
    assert again.wait_ms == 50_000
    assert msgspec.structs.replace(again, wait_ms=60_000) == pull


def test_after_a_break_the_next_request_goes_to_a_new_connection(server, queues):
    for _ in range(3):
        server.cut()
        queues.push("orders", b"x")
    assert queues.stats("orders").visible == 3


def test_a_pull_that_waits_goes_on_waiting_on_the_next_connection(server, queues):
    waiting = in_thread(lambda: queues.pull("orders", wait=600))
    until(lambda: queues.stats("orders").waiting_pulls == 1)
    server.cut()
    until(lambda: queues.stats("orders").waiting_pulls == 1)
    queues.push("orders", b"x")
    assert waiting.result(TIMEOUT_S).body == b"x"


def test_lost_connections_leave_no_socket_open_however_many_threads_used_them(server, queues):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def work(number):
        while not done.is_set():
            queues.push("orders", b"x", dedup_id=f"{number}", delay=3_600)

    # The server's end of a connection is in this process, too.
    until(lambda: len(server.frames.connections) == 1)
    before = descriptors()
    done = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(work, number) for number in range(8)]
        for _ in range(30):
            seen = server.frames.connections_seen
            server.cut()
            until(lambda seen=seen: server.frames.connections_seen > seen)
        done.set()
        for each in working:
            each.result(TIMEOUT_S)
    until(lambda: len(server.frames.connections) == 1)
    # One that an earlier test has left open may be closed meanwhile.
    until(lambda: descriptors() <= before)


def lost_midway(silent, command):
    """Sends a command to a server that reads it and closes the connection without an answer."""
    opening = in_thread(lambda: Remote(silent.endpoint, reconnect_s=5))
    link = silent.accept()
    remote = opening.result(TIMEOUT_S)
    asking = in_thread(lambda: remote.execute(command))
    frames = read_frames(link)
    link.close()
    return remote, asking, frames


def test_a_plain_push_without_an_answer_has_an_unknown_outcome(silent):
    remote, asking, _ = lost_midway(silent, Push("orders", b"x"))
    with pytest.raises(BackendLost, match=r"whether this Push was done is unknown.*dedup_id"):
        asking.result(TIMEOUT_S)
    remote.close()


def test_a_push_with_a_dedup_id_is_simply_sent_again(silent):
    remote, asking, before = lost_midway(silent, Push("orders", b"x", dedup_id="42"))
    link = silent.accept()
    after = read_frames(link)
    assert bytes(after[0][2]) == bytes(before[0][2])
    link.sendall(pack(0x81, after[0][1], b"\x93\xa1i\x01\xc2"))
    assert asking.result(TIMEOUT_S) == PushReply("i", 1, False)
    remote.close()
    link.close()


def test_after_a_goodbye_even_a_plain_push_is_sent_again(silent):
    opening = in_thread(lambda: Remote(silent.endpoint, reconnect_s=5))
    link = silent.accept()
    remote = opening.result(TIMEOUT_S)
    asking = in_thread(lambda: remote.execute(Push("orders", b"x")))
    read_frames(link)
    link.sendall(pack(0x84, 0, b"\x91\xa3why"))
    link.close()
    link = silent.accept()
    ((_, request, _),) = read_frames(link)
    link.sendall(pack(0x81, request, b"\x93\xa1i\x01\xc2"))
    assert asking.result(TIMEOUT_S) == PushReply("i", 1, False)
    remote.close()
    link.close()


def test_a_release_that_was_done_before_the_answer_was_lost_counts_as_done(silent):
    remote, asking, _ = lost_midway(silent, Release("orders", "r"))
    link = silent.accept()
    ((_, request, _),) = read_frames(link)
    words = b"\x92\xa3why\xacStaleReceipt"
    link.sendall(pack(0x82, request, words))
    assert asking.result(TIMEOUT_S) is None
    remote.close()
    link.close()


def test_in_a_repeated_batch_only_a_stale_release_counts_as_done():
    stale = StaleReceipt("why")
    batch = Batch([Release("q", "r"), Delete("q", "r"), Extend("q", "r", 1)])
    assert outcome_of_repeat(batch, [stale, stale, 7]) == [None, stale, 7]


def test_a_connection_whose_server_stops_answering_is_dropped(silent):
    opening = in_thread(lambda: Remote(silent.endpoint, timeout_s=0.3, reconnect_s=0))
    link = silent.accept()
    remote = opening.result(TIMEOUT_S)
    asking = in_thread(lambda: remote.execute(Push("orders", b"x")))
    with pytest.raises(BackendLost, match="stopped answering"):
        asking.result(TIMEOUT_S)
    remote.close()
    link.close()


def test_a_connection_without_an_answer_to_the_hello_is_dropped(silent):
    opening = in_thread(lambda: Remote(silent.endpoint, timeout_s=0.2))
    link = silent.accept(welcome=False)
    with pytest.raises(BackendLost, match="no WELCOME came"):
        opening.result(TIMEOUT_S)
    link.close()


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak Penstock frames"),
        (b"\x89PNSTK\x01\x00" + pack(0x81, 1, b"\x90"), "answered the hello with"),
        (b"\x89PNSTK\x01\x00" + pack(0x83, 0, b"\x90"), "wrong shape"),
    ],
)
def test_a_server_of_another_protocol_has_its_own_error(silent, said, wrong):
    opening = in_thread(lambda: Remote(silent.endpoint))
    link = silent.accept(welcome=False)
    link.sendall(said)
    with pytest.raises(ProtocolError, match=wrong):
        opening.result(TIMEOUT_S)
    link.close()


def test_an_answer_of_the_wrong_shape_raises_a_protocol_error(silent):
    opening = in_thread(lambda: Remote(silent.endpoint))
    link = silent.accept()
    remote = opening.result(TIMEOUT_S)
    asking = in_thread(lambda: remote.execute(Stats("orders")))
    ((_, request, _),) = read_frames(link)
    link.sendall(pack(0x81, request, b"\xa5wrong"))
    with pytest.raises(ProtocolError, match="wrong shape"):
        asking.result(TIMEOUT_S)
    remote.close()
    link.close()


def test_a_refused_connection_is_an_error_at_once():
    with refusing_port() as port, pytest.raises(BackendLost, match="Connection refused"):
        penstock.connect(f"penstock://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "url",
    [
        "penstock:",
        "penstock://",
        "penstock://host:port",
        "penstock://host:99999",
        "penstock://user@host",
        "penstock://host/path",
        "penstock://host?colour=red",
        "penstock://host?timeout=soon",
        "penstock://host?token_file=nowhere",
        "penstock://host?ca_file=nowhere",
    ],
)
def test_an_invalid_url_is_refused(url):
    with pytest.raises(InvalidField):
        penstock.connect(url)


def test_a_clock_cannot_be_given_to_another_process():
    with pytest.raises(InvalidField, match="clock"):
        penstock.connect("penstock://127.0.0.1", clock=penstock.ManualClock())


# A server of another version.


@pytest.mark.parametrize("options", [{"commands": "16"}, {}, {"commands": "many"}])
def test_a_command_that_an_older_server_does_not_know_is_not_sent(silent, options):
    opening = in_thread(lambda: Remote(silent.endpoint))
    link = silent.accept(options=options)
    remote = opening.result(TIMEOUT_S)
    with pytest.raises(UnsupportedOperation, match=r"is older than this client .* DescribeQueues"):
        remote.execute(DescribeQueues("orders"))
    # Nothing has left: the next frame is that of the next command.
    asking = in_thread(lambda: remote.execute(ListQueues()))
    ((kind, request, _),) = read_frames(link)
    assert kind == KIND_OF[ListQueues]
    link.sendall(pack(0x81, request, b"\x90"))
    assert asking.result(TIMEOUT_S) == []
    remote.close()
    link.close()


def test_an_asyncio_caller_does_not_send_it_either(silent):
    async def main():
        loop = asyncio.get_running_loop()
        accepting = loop.run_in_executor(None, lambda: silent.accept(options={"commands": "16"}))
        remote = await AsyncRemote.open(silent.endpoint)
        link = await accepting
        with pytest.raises(UnsupportedOperation, match="is older than this client"):
            await remote.execute(DescribeQueues("orders"))
        await remote.close()
        link.close()

    run(main())


def test_a_server_that_knows_the_command_gets_it(remote):
    (description,) = remote.execute(DescribeQueues("orders"))
    assert description.queue == "orders"


# Ending.


def test_closing_ends_the_waits_of_other_threads(queues):
    waiting = [in_thread(lambda: queues.pull("orders", wait=600)) for _ in range(3)]
    until(lambda: queues.stats("orders").waiting_pulls == 3)
    queues.close()
    for each in waiting:
        with pytest.raises(EngineClosed):
            each.result(TIMEOUT_S)
    with pytest.raises(EngineClosed):
        queues.push("orders", b"x")


def test_an_interrupted_pull_leaves_its_message_to_others(server, queues):
    class Interrupted(Exception):
        pass

    def interrupt(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with Queues(Remote(server.endpoint)) as other:

            def kill_when_waiting():
                until(lambda: queues.stats("orders").waiting_pulls == 1)
                os.kill(os.getpid(), signal.SIGUSR1)

            killer = in_thread(kill_when_waiting)
            with pytest.raises(Interrupted):
                other.pull("orders", wait=600)
            killer.result(TIMEOUT_S)
            until(lambda: queues.stats("orders").waiting_pulls == 0)
            queues.push("orders", b"x")
            # The connection was given up with it; the next request finds another.
            claim = other.pull("orders")
            assert claim is not None
            assert claim.body == b"x"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_child_of_a_fork_gets_a_connection_of_its_own(server, queues):
    queues.push("orders", b"parent")
    assert result_in_child(lambda: queues.push("orders", b"child")) == "done"
    queues.push("orders", b"parent again")
    bodies = [claim.body for claim in queues.pull_many("orders", 10)]
    assert bodies == [b"parent", b"child", b"parent again"]
    assert server.frames.connections_seen == 2


# For asyncio.


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


async def until_stats(ours, **wanted):
    """Wait until the queue's stats show these values; each look gives others their turn."""
    for _ in range(20_000):
        stats = await ours.stats("orders")
        if all(getattr(stats, name) == value for name, value in wanted.items()):
            return
    raise AssertionError(f"still not true: {wanted}")


def test_tasks_share_one_connection(server, queues):
    async def main():
        async with AsyncQueues(await AsyncRemote.open(server.endpoint)) as ours:

            async def work(number):
                await ours.create(f"q{number}")
                await ours.push(f"q{number}", b"%d" % number)
                claim = await ours.pull(f"q{number}")
                assert claim is not None
                return await ours.delete(claim), claim.body

            return await asyncio.gather(*map(work, range(100)))

    assert run(main()) == [(True, b"%d" % number) for number in range(100)]
    assert server.frames.connections_seen == 2


def test_a_cancelled_pull_is_cancelled_at_the_server_and_claims_nothing(server, queues):
    async def main():
        async with AsyncQueues(await AsyncRemote.open(server.endpoint)) as ours:
            task = asyncio.create_task(ours.pull("orders", wait=600))
            await until_stats(ours, waiting_pulls=1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_stats(ours, waiting_pulls=0)
            await ours.push("orders", b"x")
            return (await ours.stats("orders")).visible

    assert run(main()) == 1


def test_claims_that_come_for_a_cancelled_pull_are_released(server, queues):
    async def main():
        async with AsyncQueues(await AsyncRemote.open(server.endpoint)) as ours:
            for _ in range(30):
                task = asyncio.create_task(ours.pull("orders", wait=600))
                await asyncio.sleep(0)
                await ours.push("orders", b"x")
                task.cancel()
                done = await asyncio.gather(task, return_exceptions=True)
                if isinstance(done[0], Claim):
                    await ours.release(done[0])
                await until_stats(ours, in_flight=0)
                await ours.purge("orders")

    run(main())
    assert queues.stats("orders").messages == 0


def test_an_asyncio_pull_gives_as_many_as_were_asked_for(server, queues):
    queues.service.execute(PushMany("orders", [b"x"] * 5_000))

    async def main():
        async with AsyncQueues(await AsyncRemote.open(server.endpoint)) as ours:
            claims = await ours.pull_many("orders", 4_500)
            assert len({claim.id for claim in claims}) == 4_500

    run(main())


def test_an_asyncio_pull_cancelled_before_its_rest_came_releases_what_it_has(silent):
    with penstock.connect("memory:") as other:
        other.create("orders")
        other.push_many("orders", [b"x"] * PULL_MESSAGES_MAX)
        claims = other.pull_many("orders", PULL_MESSAGES_MAX)

    async def main():
        opening = asyncio.ensure_future(AsyncRemote.open(silent.endpoint))
        link = await asyncio.to_thread(silent.accept)
        with link:
            await exchange_frames(link, await opening)

    async def exchange_frames(link, remote):
        async with AsyncQueues(remote) as ours:
            pull = asyncio.ensure_future(ours.pull_many("orders", 5_000))
            decoder = FrameDecoder("client", {0x30: 4_096, **client_limits()})
            (_, request, _), *_ = await asyncio.to_thread(
                read_more_frames, link, decoder, 1, {PULL}
            )
            await asyncio.to_thread(link.sendall, encode_claims(request, claims))
            frames = await asyncio.to_thread(read_more_frames, link, decoder, 1, {PULL})
            rest: Any = decode_command(*frames[0][::2])
            assert (rest.limit, rest.wait_ms) == (3_000, 0)
            pull.cancel()
            wanted = {CANCEL, KIND_OF[Release]}
            ended = await asyncio.to_thread(read_more_frames, link, decoder, 1, wanted)
            assert ended[0][0] == CANCEL
            # A server answers the pull that was ended.
            await asyncio.to_thread(link.sendall, encode_claims(frames[0][1], []))
            left = 1 + len(claims) - len(ended)
            ended += await asyncio.to_thread(read_more_frames, link, decoder, left, wanted)
            released = [decode_command(kind, body) for kind, _, body in ended[1:]]
            assert released == [Release("orders", claim.receipt) for claim in claims]

    run(main())


def test_an_asyncio_caller_finds_the_next_connection_too(server, queues):
    async def main():
        loop = asyncio.get_running_loop()
        async with AsyncQueues(await AsyncRemote.open(server.endpoint)) as ours:
            task = asyncio.create_task(ours.pull("orders", wait=600))
            await until_stats(ours, waiting_pulls=1)
            await loop.run_in_executor(None, server.cut)
            await ours.push("orders", b"x")
            return await task

    assert run(main()).body == b"x"


def test_an_asyncio_push_without_an_answer_has_an_unknown_outcome(silent):
    async def main():
        loop = asyncio.get_running_loop()
        accepting = loop.run_in_executor(None, silent.accept)
        remote = await AsyncRemote.open(silent.endpoint)
        link = await accepting
        asking = asyncio.create_task(remote.execute(Push("orders", b"x")))
        await loop.run_in_executor(None, read_frames, link)
        link.close()
        with pytest.raises(BackendLost, match="whether this Push was done is unknown"):
            await asking
        await remote.close()

    run(main())


def test_an_asyncio_caller_drops_a_server_that_stops_answering(silent):
    async def main():
        loop = asyncio.get_running_loop()
        accepting = loop.run_in_executor(None, silent.accept)
        remote = await AsyncRemote.open(silent.endpoint, timeout_s=0.3, reconnect_s=0)
        link = await accepting
        with pytest.raises(BackendLost, match="stopped answering"):
            await remote.execute(Push("orders", b"x"))
        await remote.close()
        link.close()

    run(main())


def test_closing_ends_the_waits_of_other_tasks(server, queues):
    async def main():
        ours = AsyncQueues(await AsyncRemote.open(server.endpoint))
        task = asyncio.create_task(ours.pull("orders", wait=600))
        await until_stats(ours, waiting_pulls=1)
        await ours.close()
        with pytest.raises(EngineClosed):
            await task
        with pytest.raises(EngineClosed):
            await ours.push("orders", b"x")

    run(main())


# The portal.


@pytest.fixture
def portal(server, queues):
    portal = Portal(lambda: AsyncRemote.open(server.endpoint))
    yield portal
    portal.close()


def test_the_portal_gives_answers_and_errors_as_they_are(portal):
    assert portal.LACKS == {}
    ours = Queues(portal)
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda number: ours.push("orders", b"%d" % number), range(200)))
    assert len(set(ids)) == 200
    with pytest.raises(QueueNotFound):
        ours.push("nowhere", b"x")


def test_the_portal_fails_as_opening_the_service_fails():
    with refusing_port() as port, pytest.raises(BackendLost):
        Portal(lambda: AsyncRemote.open(TcpEndpoint("127.0.0.1", port)))


def test_a_closed_portal_says_so_and_ends_its_thread(portal):
    waiting = in_thread(lambda: Queues(portal).pull("orders", wait=600))
    until(lambda: Queues(portal).stats("orders").waiting_pulls == 1)
    portal.close()
    portal.close()
    with pytest.raises(EngineClosed):
        waiting.result(TIMEOUT_S)
    with pytest.raises(EngineClosed):
        portal.execute(Stats("orders"))
    # Not by its name: a service that other tests of this process share may have such a thread, too.
    assert not portal._thread.is_alive()


# A socket that somebody may be reading is shut, and closed when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_point_leaves_a_connection_or_makes_a_new_one(remote, queues):
    seen = 0
    for point in points(lambda: queues.push("orders", b"x")):
        seen = point
        assert ends_in_time(lambda: queues.stats("orders")), f"stuck, interrupted at {point}"
    assert seen > 10
