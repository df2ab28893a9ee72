"""What `top` and `tail` look at: the status of queues, over HTTP or over any store."""
