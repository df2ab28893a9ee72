"""Penstock: an SQS-class message queue you can pip install."""
