"""The console of `penstock serve`, and the status of queues that it shows."""
