"""Commands in frames, served over TCP and Unix sockets."""
