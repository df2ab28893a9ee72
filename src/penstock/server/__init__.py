"""The servers: sockets in front of an engine."""
