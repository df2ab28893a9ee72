"""Queues that Amazon SQS holds, or any endpoint that speaks its API."""
