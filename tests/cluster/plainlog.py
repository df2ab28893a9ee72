"""A replicated log in memory that executes every request at once, by the rules of `cluster.log`."""

from collections import defaultdict
from typing import ClassVar

from penstock.cluster import log
from penstock.cluster.log import LogSlot, Mismatch, Register, SlotBounds


class PlainLog:
    """A log without faults; `answer` executes one request.

    `fault(request)` may be set: it is called before each request, and may raise.
    """

    def __init__(self):
        self.slots: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.firsts = defaultdict(lambda: 1)
        self.registers = {}
        self.revision = 0
        self.chunks = {}
        self.demoted = []
        self.requests = []
        self.fault = lambda request: None
        # How many reads return nothing, as if a replica lagged.
        self.behind_for = 0

    def answer(self, request):
        self.requests.append(request)
        self.fault(request)
        return self.ANSWERS[type(request)](self, request)

    def last(self, shard):
        return max(self.slots[shard], default=self.firsts[shard] - 1)

    def _append(self, request):
        if self.last(request.shard) != request.after:
            raise Mismatch
        self.slots[request.shard][request.after + 1] = request.extent
        return request.after + 1

    def _read_slots(self, request):
        if self.behind_for:
            self.behind_for -= 1
            return []
        found = sorted(self.slots[request.shard].items())
        later = [LogSlot(*each) for each in found if each[0] >= request.first]
        return later[: request.limit]

    def _bounds(self, request):
        return SlotBounds(self.firsts[request.shard], self.last(request.shard))

    def _purge_slots(self, request):
        assert request.before <= self.last(request.shard) + 1
        self.firsts[request.shard] = max(self.firsts[request.shard], request.before)
        for number in [n for n in self.slots[request.shard] if n < request.before]:
            del self.slots[request.shard][number]

    def _demote(self, request):
        self.demoted.append(request.shard)

    def _read_register(self, request):
        return self.registers.get(request.key)

    def _read_registers(self, request):
        return [self.registers[k] for k in sorted(self.registers) if k.startswith(request.prefix)]

    def _swap(self, request):
        found = self.registers.get(request.key)
        if (found.revision if found else 0) != request.revision:
            raise Mismatch
        self.revision += 1
        self.registers[request.key] = Register(request.key, request.value, self.revision)
        return self.revision

    def _put_chunk(self, request):
        self.chunks[request.shard, request.snapshot, request.index] = request.data

    def _read_chunk(self, request):
        return self.chunks.get((request.shard, request.snapshot, request.index))

    def _drop_chunks(self, request):
        for key in [k for k in self.chunks if k[:2] == (request.shard, request.snapshot)]:
            del self.chunks[key]

    def _pause(self, request):
        pass

    ANSWERS: ClassVar = {
        log.Append: _append,
        log.ReadSlots: _read_slots,
        log.Bounds: _bounds,
        log.PurgeSlots: _purge_slots,
        log.Demote: _demote,
        log.ReadRegister: _read_register,
        log.ReadRegisters: _read_registers,
        log.Swap: _swap,
        log.PutChunk: _put_chunk,
        log.ReadChunk: _read_chunk,
        log.DropChunks: _drop_chunks,
        log.Pause: _pause,
    }
