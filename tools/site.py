"""Builds the site of the documentation into build/site: `make docs`.

The pages are copied to build/docs, so that what is made from the code stands beside them and is not
committed: the reference of the library from its docstrings, of every command from the parser, of
what each kind of store lacks from its `LACKS`, and `llms.txt`. The navigation is the list of links
in docs/index.md; a page that is not in it ends the build, as does a link to nowhere.
"""

import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import penstock
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.rabbitmq.lacks import LACKS as RABBITMQ_LACKS
from penstock.backends.redis.lacks import LACKS as REDIS_LACKS
from penstock.backends.sqs.lacks import LACKS as SQS_LACKS
from penstock.cli.parser import Parser, make_parser
from penstock.cluster.router import Router
from penstock.errors import PenstockError
from tools.surface import PARTS

ROOT: Final = Path(__file__).parents[1]
# What pages link to outside docs/.
OUTSIDE: Final = ("*.md", "LICENSE", "deploy/*", "examples/**/*", "benchmarks/results/*.md")
LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)#:]+\.md)\)(?:: ([^\[]+))?")
DECISIONS: Final = "decisions/README.md"
GENERATED: Final = {
    "The library": "reference/library.md",
    "Errors": "reference/errors.md",
    "Tasks, testing and asyncio": "reference/modules.md",
    "Commands and options": "reference/commands.md",
    "What each store lacks": "reference/stores.md",
}
LACKS_OF_STORES: Final = {
    "memory:, file:, penstock://": LoopEngine.LACKS,
    "cluster:": Router.LACKS,
    "redis://": REDIS_LACKS,
    "amqp:// (classic queues)": RABBITMQ_LACKS["classic"],
    "amqp:// (quorum queues)": RABBITMQ_LACKS["quorum"],
    "sqs://": SQS_LACKS,
}


def build(directory: Path) -> Path:
    """Builds the site in `directory` and returns it. Raises SystemExit if a page is not linked."""
    docs = directory / "docs"
    shutil.rmtree(docs, ignore_errors=True)
    for source in sources():
        target = docs / moved(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(with_moved_links(source))
        else:
            shutil.copyfile(source, target)
    for path, text in generated_pages().items():
        (docs / path).write_text(text)
    (docs / "site.css").write_text((ROOT / "tools" / "site.css").read_text())
    index = (docs / "index.md").read_text()
    (docs / "llms.txt").write_text(llms_text(index))
    configuration = (ROOT / "zensical.toml").read_text()
    nav = f"[project]\nnav = {navigation(docs, index)}\n"
    (directory / "zensical.toml").write_text(configuration.replace("[project]\n", nav, 1))
    shutil.rmtree(directory / "site", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "zensical.toml"]
    subprocess.run(command, cwd=directory, check=True)
    return directory / "site"


def sources() -> list[Path]:
    """Every file of the repository that is copied."""
    found = [path for pattern in OUTSIDE for path in ROOT.glob(pattern)]
    found += (ROOT / "docs").rglob("*")
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def moved(source: Path) -> Path:
    """Where a file of the repository is below the pages: docs/ is their root.

    README.md is renamed, because it would be the first page of the site, which is index.md.
    """
    path = source.relative_to(ROOT)
    if path.parts[0] == "docs":
        return path.relative_to("docs")
    return Path("readme.md") if path == Path("README.md") else path


def with_moved_links(source: Path) -> str:
    """The text of a page, with links to files as they are from its new place."""

    def replaced(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        if not target.is_file():
            return link[0]
        path = os.path.relpath(moved(target), moved(source).parent)
        return f"]({path}{link[2] or ''})"

    def moved_image(image: re.Match[str]) -> str:
        # A page is in a directory of its own, which HTML is not corrected for.
        target = (source.parent / image[2]).resolve()
        if not target.is_file():
            return image[0]
        return f'{image[1]}="{os.path.relpath(moved(target), moved(source).with_suffix(""))}"'

    text = re.sub(r"\]\(([^)#:]+)(#[^)]*)?\)", replaced, source.read_text())
    return re.sub(r'(src(?:set)?)="([^":]+)"', moved_image, text)


def navigation(docs: Path, index: str) -> str:
    """The navigation as TOML: the parts of the index and their pages, in its order."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for part, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL):
        parts[part] = [(title, path) for title, path, _ in LINK.findall(text)]
    parts["Reference"] += GENERATED.items()
    decisions = sorted(
        path.relative_to(docs).as_posix() for path in (docs / "decisions").glob("*.md")
    )
    linked = {path for pages in parts.values() for _, path in pages}
    outside = {
        moved(path).as_posix() for path in sources() if path.relative_to(ROOT).parts[0] != "docs"
    }
    listed = {*linked, *decisions, *outside, *GENERATED.values(), "index.md"}
    present = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    if missing := sorted(present - listed):
        raise SystemExit(f"docs/index.md does not link to {', '.join(missing)}")
    rows = ['{ "Home" = "index.md" }']
    for part, pages in parts.items():
        entries = [f'{{ "{title}" = "{path}" }}' for title, path in pages]
        if part == "Explanation":
            entries = [entry for entry in entries if '"decisions/' not in entry]
            numbered = [quoted(path) for path in decisions if path != DECISIONS]
            listing = ", ".join([f'{{ "Index" = "{DECISIONS}" }}', *numbered])
            entries.append(f'{{ "Decisions" = [{listing}] }}')
        rows.append(f'{{ "{part}" = [{", ".join(entries)}] }}')
    return f"[{', '.join(rows)}]"


def quoted(text: str) -> str:
    return f'"{text}"'


def llms_text(index: str) -> str:
    """The index of the documentation for programs that read text (llmstxt.org)."""
    title, _, rest = index.partition("\n")
    summary = rest.strip().split("\n\n")[0].replace("\n", " ")
    lines = [title, "", f"> {summary}", ""]
    for line in rest.splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        for name, path, said in LINK.findall(line):
            lines.append(f"- [{name}]({path}){f': {said}' if said else ''}")
    return "\n".join(lines) + "\n"


def generated_pages() -> Mapping[str, str]:
    """Each page that is made from the code, by its path."""
    return {
        "reference/library.md": library_page(),
        "reference/errors.md": errors_page(),
        "reference/modules.md": modules_page(),
        "reference/commands.md": commands_page(),
        "reference/stores.md": stores_page(),
    }


def library_page() -> str:
    names = [
        name
        for name in penstock.__all__
        if name != "connect" and not is_error(getattr(penstock, name))
    ]
    within = [f"{part.__module__}.{part.__name__}" for part in PARTS]
    blocks = "\n\n".join(
        [
            *(f"::: penstock.{name}" for name in ("connect", *names)),
            *(f"::: {name}" for name in within),
        ]
    )
    return (
        "# The library\n\nEvery name of `penstock`, except [its errors](errors.md), and parts of "
        "its results. [The public surface](public-surface.md) has the rules of their names.\n\n"
        f"{blocks}\n"
    )


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, PenstockError)


def errors_page() -> str:
    return (
        "# Errors\n\nThe classes are sorted by what the caller does next: fix the request, try "
        "again later, drop the connection, or stop.\n\n"
        "::: penstock.errors\n    options:\n      show_root_heading: false\n"
    )


def modules_page() -> str:
    blocks = "\n\n".join(
        f"::: {name}" for name in ("penstock.aio", "penstock.tasks.TaskApp", "penstock.tasks.Task")
    )
    return f"# Tasks, testing and asyncio\n\n{blocks}\n"


def commands_page() -> str:
    """Each command with its arguments, as the parser has them."""
    text = ["# Commands and options", "", "[The command line](cli.md) tells how to choose a store."]
    for name, parser in subparsers_of(make_parser()):
        text += ["", f"## `penstock {name}`", "", *usage_of(parser)]
        for action, inner in subparsers_of(parser):
            text += ["", f"### `penstock {name} {action}`", "", *usage_of(inner)]
    return "\n".join(text) + "\n"


def subparsers_of(parser: ArgumentParser) -> Iterator[tuple[str, Parser]]:
    """The commands of a parser, or the actions of a command, with their arguments."""
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for name, inner in action.choices.items():
                inner.load()
                yield name, inner


def usage_of(parser: ArgumentParser) -> list[str]:
    """What `--help` prints of a command, as a block."""
    return ["```text", parser.format_help().rstrip(), "```"]


def stores_page() -> str:
    """What each kind of store lacks, as its own table says."""
    text = [
        "# What each store lacks",
        "",
        "All stores pass one suite of tests of the delivery contract. What one of them cannot do",
        "is in its table, which the suite reads: nothing else may be left out.",
    ]
    for name, lacks in LACKS_OF_STORES.items():
        text += ["", f"## `{name}`", ""]
        if not lacks:
            text += ["Nothing."]
            continue
        text += ["| not there | because |", "|---|---|"]
        text += [f"| {behaviour} | {reason} |" for behaviour, reason in sorted(lacks.items())]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    print(f"the site is in {build(ROOT / 'build').relative_to(ROOT)}")
