"""SIGHUP: keys and certificates are read again, without closing a connection.

The settings are read as at the start: arguments, environment, config file. Of these only a file can
have changed. Either all of the new keys and certificates are used, from the next request and the
next handshake on, or none: what cannot be read or used is refused with a line, and the old ones
stay. Other settings need a restart; the line names those that differ.

Someone who closes the terminal of a server sends SIGHUP, too. So a server that was started on one
stops if it is gone.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from penstock.errors import InvalidField
from penstock.server.lines import RELOAD_REFUSED, RELOADED, ServerLines
from penstock.server.tls import ServerTls
from penstock.settings import ServerSettings

_RELOADED: Final = ("keys", "tls_cert", "tls_key")
_STANDARD_FILES: Final = (0, 1, 2)


class Reloader:
    """Reads the keys and certificates of a running server again."""

    def __init__(
        self,
        settings: ServerSettings,
        read: Callable[[], ServerSettings],
        tls: ServerTls | None,
        use_keys: Sequence[Callable[[Mapping[str, str]], None]],
        lines: ServerLines,
    ) -> None:
        """`read` reads the settings anew; each of `use_keys` is called with the new keys."""
        self._settings = settings
        self._read = read
        self._tls = tls
        self._use_keys = use_keys
        self._lines = lines

    def reload(self) -> bool:
        """Uses the new keys and certificates; False if they were refused, with a line."""
        try:
            settings = self._read()
            self._check(settings)
            if self._tls is not None and settings.tls_cert is not None:
                self._tls.reload(settings.tls_cert, settings.tls_key or settings.tls_cert)
        except InvalidField as error:
            self._lines.tell(RELOAD_REFUSED, reason=str(error))
            return False
        # From here on nothing can fail.
        for use_keys in self._use_keys:
            use_keys(settings.keys)
        differing = [
            name
            for name in ServerSettings.__struct_fields__
            if name not in _RELOADED and getattr(settings, name) != getattr(self._settings, name)
        ]
        before = self._settings.keys
        self._lines.tell(
            RELOADED,
            keys=len(settings.keys),
            keys_added=len(settings.keys.keys() - before.keys()),
            keys_removed=len(before.keys() - settings.keys.keys()),
            tls_cert=settings.tls_cert,
            needs_restart=",".join(differing) or None,
        )
        self._settings = msgspec.structs.replace(
            self._settings, **{name: getattr(settings, name) for name in _RELOADED}
        )
        return True

    def _check(self, settings: ServerSettings) -> None:
        """Raises InvalidField for a change that would open the server, or close it to all."""
        for name, text in (("keys", "signatures"), ("tls_cert", "TLS")):
            had, has = bool(getattr(self._settings, name)), bool(getattr(settings, name))
            if had != has:
                change = "without" if had else "with"
                raise InvalidField(
                    f"{name}: the server cannot go on {change} {text}; restart it for that"
                )


class StartingTerminal:
    """The terminal that a process was started on, if any."""

    def __init__(self) -> None:
        self._files = [number for number in _STANDARD_FILES if os.isatty(number)]

    def is_gone(self) -> bool:
        """Whether there was one, and it was closed."""
        return bool(self._files) and not any(map(os.isatty, self._files))
