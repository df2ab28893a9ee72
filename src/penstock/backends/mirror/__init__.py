"""A mirror: what happens to the queues of one service is done to those of another, in order."""
