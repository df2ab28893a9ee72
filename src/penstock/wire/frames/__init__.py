"""Penstock's own wire protocol: frames, and the commands and replies in them."""
