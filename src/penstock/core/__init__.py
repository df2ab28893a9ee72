"""The delivery state machine: pure functions of state and time; no clock, no I/O, no randomness."""
