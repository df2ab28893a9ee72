"""The Carrot protocol, bytes only: `single` is one request a connection, `session` is many."""

from typing import Final

# Every request by its opcode; those of a session begin at C0.
OPCODE_NAMES: Final = {
    0x00: "WRITE",
    0x0F: "READ",
    0xF0: "ADD_QUEUE",
    0xFF: "REMOVE_QUEUE",
    0xC0: "PUT",
    0xC1: "PUT_MANY",
    0xC2: "GET",
    0xC3: "ACK",
    0xC4: "NACK",
    0xC5: "EXTEND",
    0xC6: "ADD",
    0xC7: "REMOVE",
}
