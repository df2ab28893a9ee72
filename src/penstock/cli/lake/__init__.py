"""The actions of `penstock pipeline`, one module for each."""
