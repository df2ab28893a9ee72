"""The Carrot broker of a serving process: its settings, its listener, and how it stops."""

import asyncio
from typing import NamedTuple

from penstock.backends.loop import LoopService
from penstock.errors import InvalidField
from penstock.server.carrot.connection import listen_carrot
from penstock.server.carrot.server import CarrotServer
from penstock.server.faults import Faults
from penstock.server.frames.tcp import TcpAddress, check_exposure, read_address, read_token
from penstock.server.tls import ServerTls
from penstock.settings import ServerSettings


class CarrotListening(NamedTuple):
    """A broker's address, and the token and TLS that its clients need."""

    address: TcpAddress
    token: str | None
    tls: ServerTls | None


def read_carrot(settings: ServerSettings, tls: ServerTls | None) -> CarrotListening | None:
    """The broker that the settings ask for, if any. Raises InvalidField."""
    text = settings.carrot
    if text is None:
        return None
    try:
        if not (text.isascii() and text.isdigit()) and ":" not in text:
            raise InvalidField(f"{text[:100]!r} is not of the form [HOST:]PORT")
        address = read_address(f"127.0.0.1:{text}" if text.isdigit() else text)
        token = None if settings.token_file is None else read_token(settings.token_file)
        check_exposure(
            address,
            has_token=token is not None or settings.insecure_without_keys,
            has_tls=tls is not None or settings.insecure_without_tls,
            override="--insecure-without-keys and --insecure-without-tls",
        )
    except InvalidField as error:
        raise InvalidField(f"carrot: {error}") from None
    return CarrotListening(address, token, tls)


class CarrotBroker:
    """A Carrot server on an address, beside the other servers of this process."""

    def __init__(self, service: LoopService, listening: CarrotListening, faults: Faults) -> None:
        self.server = CarrotServer(service, token=listening.token, faults=faults)
        self.address = listening.address
        self._tls = listening.tls
        self._listener: asyncio.Server | None = None

    async def listen(self) -> None:
        """Starts to accept clients. Raises AddressInUse or InvalidField."""
        self._listener = await listen_carrot(self.server, self.address, self._tls)
        self.address = TcpAddress(self.address.host, self._listener.sockets[0].getsockname()[1])

    async def stop(self, reason: str) -> None:
        """Answers the requests that were read, and closes the connections."""
        if self._listener is not None:
            self._listener.close()
        await self.server.stop(reason)
