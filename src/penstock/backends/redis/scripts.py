"""The Lua scripts: read from their files once, and called by the SHA of their text.

Each script is the first line of its file (its flags), then `queue.lua`, then the rest of the file.
The script `push_plain` is that of a push with `push_plain.lua` before `queue.lua`. A server that
lacks a script replies NOSCRIPT; `link` then loads all of them.
"""

import hashlib
from importlib.resources import files
from typing import Final, NamedTuple

NAMES: Final = (
    "arrive",
    "configure",
    "create",
    "owed",
    "peek",
    "pull",
    "push",
    "receipts",
    "redrive",
    "remove",
    "stats",
    "tick",
)


class Script(NamedTuple):
    """A script as the server gets it, and the SHA by which it is called."""

    text: str
    sha: str


def _read(name: str) -> str:
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def _assemble(name: str, shared: str, before: str = "") -> Script:
    flags, _, rest = _read(name).partition("\n")
    text = f"{flags}\n{before}{shared}\n{rest}"
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_SHARED: Final = _read("queue")
SCRIPTS: Final = {name: _assemble(name, _SHARED) for name in NAMES} | {
    "push_plain": _assemble("push", _SHARED, _read("push_plain"))
}
