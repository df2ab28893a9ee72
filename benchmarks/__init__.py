"""What Penstock's speed is, measured beside its peers: `make bench NAME=memory`."""
