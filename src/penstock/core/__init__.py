"""The delivery state machine: pure decisions on messages, with no clock, no I/O and no chance."""
