"""A client of the queues of another process, over Penstock's own wire protocol."""
