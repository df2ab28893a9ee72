"""A server for tests: time that can be moved, faults by seed, a store of its own an account."""
