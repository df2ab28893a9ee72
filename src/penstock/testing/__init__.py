"""Test support for backends: the delivery contract as a suite that any backend can run."""
