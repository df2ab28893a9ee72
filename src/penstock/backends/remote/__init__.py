"""Queues of another process, reached over our own wire."""
