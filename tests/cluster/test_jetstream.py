"""The replicated log on three real NATS servers keeps the rules of `cluster.log`."""

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import nats.errors
import pytest

from penstock.cluster.address import read_address
from penstock.cluster.extent import Extent, pack_extent
from penstock.cluster.jetstream import JetStream, open_client
from penstock.cluster.log import (
    Append,
    Bounds,
    Demote,
    DropChunks,
    Mismatch,
    PurgeSlots,
    PutChunk,
    ReadChunk,
    ReadRegister,
    ReadRegisters,
    ReadSlots,
    Swap,
    Unanswered,
)
from penstock.cluster.membership import REPLICAS
from penstock.cluster.nats_servers import find_program
from penstock.cluster.takeover import append_extent
from penstock.errors import BackendLost, StoreUnusable
from penstock.url import read_url
from tests.ports import refusing_port


@pytest.fixture
def on_log(cluster_url, monkeypatch):
    """Runs a coroutine function with a new log, whose servers may take `append_s` for an append."""

    async def run(work, append_s):
        address = read_address(read_url(cluster_url))
        log = JetStream(await open_client(address, "test"), address.name)
        try:
            assert address.shards is not None
            await log.prepare_registers(REPLICAS)
            await log.prepare(address.shards, REPLICAS)
            await become_ready(log, address.shards)
            monkeypatch.setattr("penstock.cluster.jetstream._APPEND_S", append_s)
            return await work(log)
        finally:
            await log.close()

    return lambda work, *, append_s=20.0: asyncio.run(run(work, append_s))


async def become_ready(log, shards):
    """Waits until every shard's stream answers: new streams may have no leader yet."""
    for shard in range(shards):
        for request in (Bounds(shard), ReadSlots(shard, 1)):
            is_answered = False
            while not is_answered:
                with suppress(Unanswered):
                    await log.execute(request)
                    is_answered = True


async def read_until(log, first, last):
    """The slots from first to last; replicas may lag for a moment."""
    while True:
        found = await log.execute(ReadSlots(0, first))
        if found and found[-1].number >= last:
            return found


def test_slots_are_taken_in_order_and_only_after_the_last(on_log):
    async def work(log):
        assert await log.execute(Bounds(0)) == (1, 0)
        assert await log.execute(Append(0, 0, b"one")) == 1
        for after in (0, 2, 9):
            with pytest.raises(Mismatch):
                await log.execute(Append(0, after, b"no"))
        assert await log.execute(Append(0, 1, b"two")) == 2
        assert await log.execute(Bounds(0)) == (1, 2)
        assert await read_until(log, 1, 2) == [(1, b"one"), (2, b"two")]
        assert await log.execute(ReadSlots(0, 3)) == []
        assert await log.execute(ReadSlots(1, 1)) == []

    on_log(work)


def test_of_many_appends_with_one_expectation_one_is_taken(on_log):
    async def work(log):
        tries = [log.execute(Append(0, 0, b"%d" % n)) for n in range(20)]
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        # On a busy machine an answer may come too late, also that of the append that was taken.
        taken = outcomes.count(1)
        late = sum(isinstance(outcome, Unanswered) for outcome in outcomes)
        refused = sum(isinstance(outcome, Mismatch) for outcome in outcomes)
        assert taken + late + refused == 20
        assert taken == 1 or late >= 1 > taken
        assert (await log.execute(Bounds(0))).last == 1

    on_log(work)


def test_purged_slots_are_gone_and_the_others_keep_their_numbers(on_log):
    async def work(log):
        for after in range(5):
            await log.execute(Append(0, after, b"%d" % after))
        await log.execute(PurgeSlots(0, 4))
        await log.execute(PurgeSlots(0, 4))
        assert await log.execute(Bounds(0)) == (4, 5)
        assert await log.execute(Append(0, 5, b"six")) == 6
        while (found := await read_until(log, 1, 6))[0].number < 4:
            pass
        assert [number for number, _ in found] == [4, 5, 6]

    on_log(work)


def test_after_a_demotion_the_log_has_all_slots_and_takes_more(on_log, monkeypatch):
    async def work(log):
        for after in range(3):
            await log.execute(Append(0, after, b"%d" % after))
        await log.execute(Demote(0))
        # Without a leader an append is lost.
        monkeypatch.setattr("penstock.cluster.jetstream._APPEND_S", 0.5)
        slot = 3
        while slot == 3:
            try:
                slot = await log.execute(Append(0, 3, b"3"))
            except Exception as error:
                if isinstance(error, Mismatch):
                    slot = 4
        assert await read_until(log, 1, 4) == [(n + 1, b"%d" % n) for n in range(4)]

    on_log(work)


def test_registers_are_swapped_by_revision(on_log):
    async def work(log):
        first = await log.execute(Swap("owner.1", b"a", 0))
        with pytest.raises(Mismatch):
            await log.execute(Swap("owner.1", b"b", 0))
        other = await log.execute(Swap("owner.2", b"c", 0))
        second = await log.execute(Swap("owner.1", b"b", first))
        assert first < other < second
        while (found := await log.execute(ReadRegister("owner.1"))).revision < second:
            pass
        assert found == ("owner.1", b"b", second)
        assert await log.execute(ReadRegister("owner.3")) is None
        assert await log.execute(Swap("other", b"d", 0)) > second
        while len(every := await log.execute(ReadRegisters("owner."))) < 2:
            pass
        assert every == [("owner.1", b"b", second), ("owner.2", b"c", other)]
        assert await log.execute(ReadRegisters("nothing.")) == []

    on_log(work)


def test_chunks_are_kept_until_they_are_dropped(on_log):
    async def work(log):
        big = b"z" * 900_000
        await log.execute(PutChunk(1, "s1", 0, big))
        await log.execute(PutChunk(1, "s1", 0, big))
        await log.execute(PutChunk(1, "s2", 0, b"other"))
        while await log.execute(ReadChunk(1, "s1", 0)) != big:
            pass
        await log.execute(DropChunks(1, "s1"))
        while await log.execute(ReadChunk(1, "s1", 0)) is not None:
            pass
        assert await log.execute(ReadChunk(1, "s2", 0)) == b"other"

    on_log(work)


def test_streams_that_exist_are_used_as_they_are(on_log):
    async def work(log):
        await log.execute(Append(0, 0, b"kept"))
        await log.prepare(2, 3)
        assert await log.execute(Bounds(0)) == (1, 1)

    on_log(work)


LOSSY = {"max_msgs": 10, "max_bytes": 10_000, "max_age": 10**12, "allow_direct": False}


def test_a_stream_that_would_lose_messages_is_refused(on_log):
    """A stream with a limit discards its oldest messages, which are the log of a shard."""

    async def work(log):
        stream = f"{log._name}_shard_0"
        info = await log._checked_api(f"STREAM.INFO.{stream}")
        created = info["config"]
        assert (created["num_replicas"], created["discard"]) == (3, "new")
        for name, value in LOSSY.items():
            lossy = {**created, "discard": "old", name: value}
            await log._checked_api(f"STREAM.UPDATE.{stream}", lossy)
            with pytest.raises(StoreUnusable, match=f"{stream} exists with {name}={value}"):
                await log.prepare(2, 3)
        # What an operator may choose.
        chosen = {**created, "max_bytes": 10**9, "description": "the orders of the shop"}
        await log._checked_api(f"STREAM.UPDATE.{stream}", chosen)
        await log.prepare(2, 3)

    on_log(work)


async def leader_of(log, shard):
    """The server that leads a shard's stream, and all servers that have it."""
    stream = f"{log._name}_shard_{shard}"
    while True:
        cluster = (await log._checked_api(f"STREAM.INFO.{stream}"))["cluster"]
        if cluster.get("leader"):
            return cluster["leader"], {cluster["leader"], *(r["name"] for r in cluster["replicas"])}


async def move_leader_away(log, shard):
    """Makes another server than that of this connection the leader of a shard's stream."""
    here = log._client._server_info["server_name"]
    stream = f"{log._name}_shard_{shard}"
    leader, servers = await leader_of(log, shard)
    while leader == here:
        away = {"placement": {"preferred": min(servers - {here})}}
        with suppress(TimeoutError, nats.errors.Error):
            await log._api(f"STREAM.LEADER.STEPDOWN.{stream}", away)
        with suppress(TimeoutError, Unanswered, nats.errors.Error):
            leader, servers = await leader_of(log, shard)
    return here


def test_a_leader_that_was_moved_here_leads_before_anything_is_appended(on_log, monkeypatch):
    """A stream without a leader drops appends, each of which is repeated only after a timeout."""
    # On a busy machine an election takes longer than a node waits for it.
    waits_s = 2.0
    monkeypatch.setattr("penstock.cluster.jetstream._LEADER_S", waits_s)

    async def work(log):
        loop = asyncio.get_running_loop()
        for round_number in range(3):
            here = await move_leader_away(log, 0)
            last = (await log.execute(Bounds(0))).last
            leader = None
            while leader != here:
                began_s = loop.time()
                await log.move_leader_here(0)
                took_s = loop.time() - began_s
                leader, _ = await leader_of(log, 0)
                # The servers may elect another one than the preferred: it was waited for in vain.
                assert leader == here or took_s >= waits_s
            extent = pack_extent(Extent(0, 1, 0, 0, b"%d" % round_number))
            assert await log.run(append_extent(0, 1, last, extent)) == last + 1

    on_log(work)


def is_stopped(pid):
    """Whether the signal has stopped the process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_an_append_that_is_lost_after_its_leader_was_moved_is_repeated_soon(
    on_log, nats_servers, monkeypatch
):
    monkeypatch.setattr("penstock.cluster.jetstream._UNSTABLE_S", 60.0)

    async def work(log):
        loop = asyncio.get_running_loop()
        await move_leader_away(log, 0)
        await log.move_leader_here(0)
        here = log._client._server_info["server_name"]
        others = [
            process.pid for n, process in enumerate(nats_servers.processes) if f"n{n + 1}" != here
        ]
        began_s = loop.time()
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        while not all(map(is_stopped, others)):
            pass
        try:
            # Without a majority it is never answered.
            with pytest.raises(Unanswered):
                await log.execute(Append(0, 0, b"lost"))
            assert loop.time() - began_s < 30
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    # At any other time an append would be given up only when the test has failed.
    on_log(work, append_s=60.0)


def test_an_error_names_servers_that_cannot_be_reached_without_the_password():
    with refusing_port() as port:
        address = read_address(read_url(f"cluster:nats://me:secret@127.0.0.1:{port}"))
        with pytest.raises(BackendLost, match=f"127.0.0.1:{port}: cannot be reached") as caught:
            asyncio.run(open_client(address, "test"))
    assert "secret" not in str(caught.value)


def test_a_connection_whose_handshake_fails_is_closed_before_the_next_is_opened():
    """A server that is starting may accept connections and send something invalid."""
    opened: list[int] = []

    async def work():
        lost, ended = asyncio.Event(), asyncio.Event()

        async def serve(reader, writer):
            number = len(opened)
            opened.append(number)
            if number == 0:
                writer.write(b'INFO {"server_id": "x", "version": "2.12.0", "headers": true}\r\n')
                assert (await reader.readline()).startswith(b"CONNECT")
                assert await reader.readline() == b"PING\r\n"
                writer.write(b"PONG\r\n")
                await lost.wait()
            else:
                writer.write(b"+OK\r\n")
                await reader.read()
            writer.close()
            if number == 3:
                ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = await open_client(
            read_address(read_url(f"cluster:nats://me:secret@127.0.0.1:{port}")), "test"
        )
        lost.set()
        try:
            async with asyncio.timeout(20):
                await ended.wait()
        finally:
            await client.close()
            server.close()

    asyncio.run(work())
    assert len(opened) >= 4


def test_a_wrong_password_is_refused(nats_servers):
    url = nats_servers.url.replace(nats_servers.password, "guess")
    with pytest.raises(BackendLost, match=r"cannot be reached: .*(?i:authorization)"):
        asyncio.run(open_client(read_address(read_url(url)), "test"))


def test_the_servers_program_comes_with_its_package():
    shown = subprocess.run([find_program(), "-v"], capture_output=True, text=True, check=True)
    assert "nats-server" in shown.stdout
