"""Shards with fenced owners on a replicated log: which node decides for which queues."""
