"""A mirror: every change to the queues of one service is repeated on another one, in order."""
