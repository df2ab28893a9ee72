"""The speed of Penstock and of its peers, measured side by side: `make bench NAME=memory`."""
