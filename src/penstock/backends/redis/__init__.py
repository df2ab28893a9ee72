"""Queues in Redis: `service` opens them, `lua/` has the scripts that change them."""
