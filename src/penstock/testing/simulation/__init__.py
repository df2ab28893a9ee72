"""The cluster in one process, with time, network, servers and faults decided by a seed."""
