"""The Carrot broker: the Carrot protocol in front of any queue service."""
