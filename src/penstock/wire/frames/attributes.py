"""Decodes a message's attributes, which a peer may have sent with any content."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.errors import InvalidField

_decode_any: Final = msgspec.msgpack.Decoder().decode


def read_attributes(raw: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Decodes attributes that were left undecoded because their size is not known yet.

    Raises InvalidField for a value that is neither text nor bytes, without decoding it.
    """
    found = {}
    for name, value in raw.items():
        first = memoryview(value)[0]
        # fixstr, str 8 to 32, bin 8 to 32: everything else could be a list of a million lists.
        if not (0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB or 0xC4 <= first <= 0xC6):
            raise InvalidField(f"attributes[{name!r}]: expected text or bytes")
        try:
            found[name] = _decode_any(value)
        except UnicodeDecodeError:
            raise InvalidField(f"attributes[{name!r}]: is not UTF-8") from None
    return found
