"""The actions of `penstock pipeline`, one module an action."""
