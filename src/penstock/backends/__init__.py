"""The backends: the engine itself, and adapters to other services.

`penstock.url` lists which module opens which scheme.
"""

from typing import cast

from penstock.clock import Clock
from penstock.service import AsyncQueueService, QueueService
from penstock.url import load_backend, read_url


def open_service(url: str, clock: Clock | None = None) -> QueueService:
    """The blocking service at a URL. Raises InvalidField, or what the backend raises."""
    found = read_url(url)
    return cast(QueueService, load_backend(found).open_service(found, clock))


async def open_async_service(url: str, clock: Clock | None = None) -> AsyncQueueService:
    """The asyncio service at a URL. Raises InvalidField, or what the backend raises."""
    found = read_url(url)
    return cast(AsyncQueueService, await load_backend(found).open_async_service(found, clock))
