"""The JavaScript module and the styles that draw for the console and for the report."""

import re
from pathlib import Path
from typing import Final

FILES: Final = {name: Path(__file__).with_name(name) for name in ("draw.js", "draw.css")}
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)


def joined_script(script: str) -> str:
    """One script of the module and of a script that uses it, for a page that is one file."""
    module = _EXPORT.sub("", FILES["draw.js"].read_text())
    return f'"use strict";\n{{\n{module}{script}}}\n'


def joined_style(style: str) -> str:
    """The styles for what the module draws, and those of such a page."""
    return FILES["draw.css"].read_text() + style
