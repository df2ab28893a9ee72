"""The wire protocols: for each, functions that turn bytes into commands and back, without I/O."""
