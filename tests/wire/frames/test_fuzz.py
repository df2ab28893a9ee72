"""Row 19 of the scorecard: malformed streams of frames.

To the decoder: typed errors, bounded time and memory. To a daemon that is a process, with a probe
beside: no traceback, no long answer to the probe, no memory taken.
"""

import random
import socket
import time
import tracemalloc

import pytest

from penstock.errors import PenstockError, ProtocolError
from penstock.wire.frames.bodies import DECODE, DECODE_REPLY, decode_command
from penstock.wire.frames.bulk import decode_bulk, decode_bulk_reply
from penstock.wire.frames.frames import (
    BULK_PUSH,
    ERROR,
    PRELUDE,
    REPLY,
    FrameDecoder,
    Hello,
    client_limits,
    decode_answer,
    decode_hello,
    encode_hello,
    server_limits,
)
from tests.conftest import FULL
from tests.measure import SLACK, memory_bytes
from tests.server.conftest import DaemonProcess
from tests.server.probe import probing
from tests.wire.frames.test_frames import read_golden

STREAMS = 20_000
DAEMON_STREAMS = 60_000 if FULL else 3_000
FRAME_BYTES_MAX = 1024 * 1024
# The odd bytes of MessagePack and of our header, which a random byte seldom hits.
EDGES = bytes.fromhex("00 01 7f 80 8f 90 9f a0 bf c0 c1 c4 c6 c9 cf d3 d9 db dc dd de df ff")


def mutated(chance, data):
    """The bytes with a few of them changed, doubled, cut out or swapped for others."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0:
                found[at : at + 1] = bytes([chance.choice(EDGES)])
            case 1:
                found[at : at + 1] = bytes([chance.randrange(256)])
            case 2:
                del found[at : at + chance.randint(1, 8)]
            case 3:
                found[at:at] = chance.randbytes(chance.randint(1, 8))
            case 4:
                found[at:at] = found[at : at + chance.randint(1, 40)]
    return bytes(found)


def chunks(chance, data):
    while data:
        size = chance.choice((1, 7, 100, 10_000))
        yield data[:size]
        data = data[size:]


def send_and_drain(port, parts):
    """Sends parts of a stream and reads to the end; fails if the server does not close it."""
    sent = []
    with socket.create_connection(("127.0.0.1", port), 5) as wire:
        try:
            for part in parts:
                sent.append(part)
                wire.sendall(part)
            wire.shutdown(socket.SHUT_WR)
            while wire.recv(65_536):
                pass
        except TimeoutError:
            pytest.fail(f"the server did not answer {b''.join(sent)!r}")
        except OSError:
            pass  # it had answered and closed before it was sent everything


def take_request(kind, body):
    """What a server does with a frame; true if it held a command."""
    try:
        if kind == BULK_PUSH:
            decode_bulk(body)
        elif kind in DECODE:
            decode_command(kind, body)
        else:
            decode_hello(body)
    except PenstockError:
        return False
    return True


@pytest.fixture(scope="module")
def golden():
    return [data.removeprefix(PRELUDE) for data in read_golden().values()]


@pytest.mark.parametrize("part", range(500 if FULL else 1))
def test_no_stream_from_a_client_does_more_than_raise_what_it_should(golden, part):
    chance = random.Random(20_000 + 100 * part)
    limits = client_limits(FRAME_BYTES_MAX)
    good = bad = faults = 0
    tracemalloc.start()
    slowest_s = 0.0
    for _ in range(STREAMS):
        began_s = time.thread_time()
        decoder = FrameDecoder("client", limits)
        stream = PRELUDE + b"".join(chance.choice(golden) for _ in range(3))
        for chunk in chunks(chance, mutated(chance, stream)):
            for kind, _, body in decoder.feed(chunk):
                if take_request(kind, body):
                    good += 1
                else:
                    bad += 1
        assert decoder.error is None or isinstance(decoder.error, ProtocolError)
        faults += decoder.error is not None
        slowest_s = max(slowest_s, time.thread_time() - began_s)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # It got somewhere: all three outcomes are common.
    assert min(good, bad, faults) > 1_000
    assert slowest_s < 1.0
    assert peak_bytes < 16 * 1024 * 1024


def test_no_answer_from_a_server_does_more_than_raise_what_it_should(golden):
    chance = random.Random(20_001)
    limits = server_limits(FRAME_BYTES_MAX)
    decoders = [*DECODE_REPLY.values(), decode_bulk_reply]
    good = bad = 0
    for _ in range(STREAMS // 4):
        decoder = FrameDecoder("server", limits)
        stream = PRELUDE + chance.choice(golden) + chance.choice(golden)
        for kind, _, body in decoder.feed(mutated(chance, stream)):
            for decode in decoders:
                try:
                    decode_answer(REPLY if kind != ERROR else kind, body, decode)
                    good += 1
                except PenstockError:
                    bad += 1
    assert min(good, bad) > 200


def test_no_bulk_push_does_more_than_raise_what_it_should():
    chance = random.Random(20_002)
    body = read_golden()["bulk push"][10:]
    outcomes = [take_request(BULK_PUSH, mutated(chance, body)) for _ in range(STREAMS // 4)]
    assert 100 < sum(outcomes) < len(outcomes) - 100


def test_no_stream_of_frames_crashes_or_holds_up_a_daemon(golden, tmp_path, record_property):
    """Row 19: the whole server, reached by TCP."""
    chance = random.Random(20_003)
    daemon = DaemonProcess(tmp_path / "store", "--listen", "127.0.0.1:0", "--durability", "os")
    try:
        hello = encode_hello(Hello("fuzz"))
        before_bytes = memory_bytes(daemon.process.pid)
        with probing(daemon.port, daemon.process.pid, "frames") as seen:
            for turn in range(DAEMON_STREAMS):
                stream = b"".join(chance.choice(golden) for _ in range(3))
                sent = hello + mutated(chance, stream) if turn % 4 else mutated(chance, hello)
                send_and_drain(daemon.port, chunks(chance, sent))
        grown_bytes = seen.peak_bytes - before_bytes
        record_property("figure", f"{seen.longest_ms:.0f} ms, {grown_bytes / 2**20:.1f} MiB")
        assert seen.longest_ms <= 200 * SLACK
        assert grown_bytes <= 16 * 1024 * 1024
        assert daemon.process.poll() is None
    finally:
        printed = daemon.stop()
    assert "Traceback" not in printed
    assert daemon.process.returncode == 0
