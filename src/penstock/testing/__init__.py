"""What Penstock gives to those who test: the delivery contract as a suite any backend can run."""
