"""The shop of `penstock demo`: producers and consumers that crash, and what they were answered."""
