"""What travels: for each protocol a pair of functions between bytes and commands, and no I/O."""
