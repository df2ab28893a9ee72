"""The servers that clients are tested against."""

from tests.server.conftest import serve

__all__ = ["serve"]
