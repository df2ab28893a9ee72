"""Row 18 of the scorecard: under a steady load, memory and files stay flat, and the disk small.

One server process is used through all its protocols at once for 60 s in `make score`, for an hour
with the full figures, and in the suite until it has written enough. What is stored stays about the
same all the time: each message is deleted again, and some only after many others came, so that
every file of the journal has a few that are still needed.
"""

import json
import os
import statistics
import threading
import time
from collections import deque
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import penstock
from penstock import carrot
from penstock.errors import PenstockError
from tests.conftest import FULL
from tests.measure import IN_SCORE
from tests.server.carrot.test_serve import carrot_port
from tests.server.sqs.conftest import serve
from tests.server.sqs.test_attacks import answer, connect, post

MIB = 1_048_576
SOAK_S = 3_600 if FULL else 60 if IN_SCORE else 2
SAMPLE_S = SOAK_S / 100
KEPT_BYTES = (512 if IN_SCORE or FULL else 8) * MIB
BODY_BYTES = 32_768
BULK, BULK_BODY_BYTES = 8, 524_288
# What the journal may have beside twice the messages: it is shrunk after it has grown by 32 MiB
# twice. A flood, as in the suite, adds what is written while it is shrunk.
JOURNAL_BYTES = (64 if IN_SCORE or FULL else 224) * MIB
PACE_S = 0.02 if IN_SCORE or FULL else 0
DISK_BYTES_MAX = 2 * KEPT_BYTES + JOURNAL_BYTES
# More than may be on the disk: what was written does not stay there.
WRITTEN_BYTES_MIN = DISK_BYTES_MAX * 4 // 3
# By how much the figures of the last third may exceed those of the one before: the allocator keeps
# freed memory, and clients and threads that come and go have files open for a short time.
GROWN_BYTES_MAX = 8 * MIB
GROWN_FILES_MAX = 8


class Sample:
    """The figures of a process and its store at one time."""

    def __init__(self, pid, store):
        status = Path(f"/proc/{pid}/status").read_text()
        # Pages of the mapped journal are not counted: the system drops them when it needs memory.
        self.memory_bytes = 1_024 * int(status.split("RssAnon:")[1].split()[0])
        self.threads = int(status.split("Threads:")[1].split()[0])
        self.files = len(os.listdir(f"/proc/{pid}/fd"))
        self.disk_bytes = disk_bytes(store)


def disk_bytes(store):
    """How much room a store takes on the disk, as far as it is not removed meanwhile."""
    size = 0
    for path in store.rglob("*"):
        with suppress(FileNotFoundError):
            size += path.stat().st_blocks * 512
    return size


class Load:
    """Clients of one server, each in a thread that repeats its round until the load ends."""

    def __init__(self, server, store):
        self._server = server
        self._url = f"file:{store}"
        self._ended = threading.Event()
        self.queues = penstock.connect(self._url)
        self._stack = ExitStack()
        self._stack.enter_context(closing(self.queues))
        self._wire = self._stack.enter_context(connect(server))
        self._broker = self._stack.enter_context(carrot.connect("127.0.0.1", carrot_port(server)))
        self.rounds = {"sqs": 0, "frames": 0, "carrot": 0, "others": 0}
        self.errors: list[BaseException] = []
        self._kept: deque[str] = deque()
        names = ("sqs", "frames", "carrot", "others")
        self._threads = [threading.Thread(target=self._repeat, args=(name,)) for name in names]

    def begin(self):
        for name in ("churn", "kept", "bulk", "poison"):
            self._ask("CreateQueue", QueueName=name)
        self._broker.add("carrots")
        self.queues.configure("poison", dead_letter="dead", max_receives=2)
        while len(self._kept) * BODY_BYTES < KEPT_BYTES:
            self._keep_one()
        for thread in self._threads:
            thread.start()

    def _repeat(self, name):
        try:
            while not self._ended.is_set():
                getattr(self, f"_use_{name}")(self.rounds[name])
                self.rounds[name] += 1
                self._ended.wait(PACE_S)
        except BaseException as error:
            self.errors.append(error)

    def end(self):
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._stack.close()
        assert self.errors == []

    @property
    def written_bytes(self):
        """The bodies that were written to the journal since the load began, about."""
        by_sqs = 10 * BODY_BYTES * self.rounds["sqs"]
        return by_sqs + (BULK * BULK_BODY_BYTES + BODY_BYTES) * self.rounds["frames"]

    def _ask(self, action, **fields):
        self._wire.sendall(post(action, json.dumps(fields).encode()))
        head, _, body = answer(self._wire).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), body
        return json.loads(body or b"{}")

    def _use_sqs(self, number):
        entries = [{"Id": str(each), "MessageBody": "x" * BODY_BYTES} for each in range(10)]
        self._ask("SendMessageBatch", QueueUrl="churn", Entries=entries)
        found = self._ask("ReceiveMessage", QueueUrl="churn", MaxNumberOfMessages=10)["Messages"]
        receipts = [
            {"Id": str(each), "ReceiptHandle": message["ReceiptHandle"]}
            for each, message in enumerate(found)
        ]
        self._ask("DeleteMessageBatch", QueueUrl="churn", Entries=receipts)

    def _use_frames(self, number):
        self.queues.push_many("bulk", [b"x" * BULK_BODY_BYTES] * BULK)
        self.queues.delete_many(self.queues.pull_many("bulk", BULK))
        self._keep_one()
        oldest = self.queues.pull("kept")
        assert oldest is not None
        assert oldest.id == self._kept.popleft()
        self.queues.delete(oldest)

    def _keep_one(self):
        self._kept.append(self.queues.push("kept", b"x" * BODY_BYTES).id)

    def _use_carrot(self, number):
        self._broker.put_many("carrots", [b"x" * 1_000] * 20)
        self._broker.ack(self._broker.get_many("carrots", 20))

    def _use_others(self, number):
        """What leaves things behind if it is not cleaned up: connections, queues, dead letters."""
        name = f"once-{number}"
        with connect(self._server) as wire:
            for action, fields in (
                ("CreateQueue", {"QueueName": name}),
                ("SendMessage", {"QueueUrl": name, "MessageBody": "x"}),
                ("DeleteQueue", {"QueueUrl": name}),
                ("SendMessage", {"QueueUrl": name, "MessageBody": "refused"}),
            ):
                wire.sendall(post(action, json.dumps(fields).encode()))
                assert answer(wire).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 "))
            # It hangs up while it waits for a message, or amid a request.
            poll = {"QueueUrl": "dead", "WaitTimeSeconds": 20}
            waiting = post("ReceiveMessage", json.dumps(poll).encode())
            wire.sendall(waiting if number % 2 else waiting[:-20])
        with connect(self._server) as wire:
            wire.sendall(b"GARBAGE\r\n\r\n")
            answer(wire)
        with closing(penstock.connect(self._url)) as others:
            others.push("poison", b"x", dedup_id=name)
            for _ in range(2):
                claim = others.pull("poison")
                assert claim is not None
                others.release(claim)
            with suppress(PenstockError):
                others.pull("missing")
            others.purge("dead")


def third(samples, number):
    size = len(samples) // 3
    return samples[number * size : (number + 1) * size]


def check_flat(samples, record_property):
    """The last third of the time is compared with the third before it."""
    figures = []
    for name, most in (
        ("memory_bytes", GROWN_BYTES_MAX),
        ("files", GROWN_FILES_MAX),
        ("threads", 1),
    ):
        before, after = (
            statistics.median(getattr(each, name) for each in third(samples, number))
            for number in (1, 2)
        )
        figures.append(f"{name.replace('_', ' ')} {before:,.0f} to {after:,.0f}")
        record_property("figure", f"{SOAK_S} s: {figures[-1]}")
        assert after <= before + most, figures[-1]


def test_under_a_steady_load_memory_files_and_disk_are_flat(quick_path, record_property):
    """Row 18."""
    store = quick_path / "store"
    words = ("--store", f"file:{store}?durability=os", "--carrot", "0")
    with serve(*words) as server:
        load = Load(server, store)
        load.begin()
        samples = []
        until_s = time.monotonic() + SOAK_S
        while time.monotonic() < until_s or load.written_bytes < WRITTEN_BYTES_MIN:
            samples.append(Sample(server.process.pid, store))
            threading.Event().wait(SAMPLE_S)
            assert load.errors == []
        load.end()
        check_flat(samples, record_property)
        most_bytes = max(each.disk_bytes for each in third(samples, 1) + third(samples, 2))
        record_property("figure", f"{most_bytes / KEPT_BYTES:.2f} × the live data on the disk")
        record_property("figure", f"{load.written_bytes / MIB:,.0f} MiB written")
        assert most_bytes <= DISK_BYTES_MAX
        assert all(load.rounds.values())
