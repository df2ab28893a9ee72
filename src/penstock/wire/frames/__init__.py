"""Our own wire: frames, and the commands and replies in them."""
