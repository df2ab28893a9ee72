"""Makes the pages about parity, and the tables in others, from results/parity.json.

`make parity ARGS=--pages` writes them; a test compares.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.testing.sqs import CHECKS, Check

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = Path(__file__).parent / "results/parity.json"
OVERVIEW: Final = ROOT / "docs/reference/parity.md"
# Every check is a row of one of these; a page of documentation has at most 15 KB.
ROWS: Final = {
    ROOT / "docs/reference/parity-queues.md": (
        "Queues and their settings",
        ("create and find", "attributes", "tags", "permissions", "purge and delete"),
    ),
    ROOT / "docs/reference/parity-messages.md": (
        "Messages, receipts and errors",
        (
            "send and receive",
            "limits of a message",
            "message attributes and MD5",
            "delays and retention",
            "visibility",
            "receipts",
            "long polls",
            "batches",
            "errors in JSON",
            "the Query protocol",
        ),
    ),
    ROOT / "docs/reference/parity-fifo.md": (
        "FIFO queues and dead letters",
        (
            "FIFO order and groups",
            "FIFO deduplication",
            "receive attempt ids",
            "fair queues",
            "dead letters",
            "message move tasks",
        ),
    ),
}
OURS: Final = "Penstock"
# The columns of README's table, and which server of the results is in each.
README_COLUMNS: Final = (
    "Penstock",
    "AWS Emulator",
    "LocalStack",
    "ElasticMQ",
    "moto",
    "Amazon SQS",
)
BEGIN, END = "<!-- made from benchmarks/results/parity.json -->", "<!-- end -->"
LEGEND = (
    "`+` holds over both protocols, `J` over JSON only, `Q` over Query only, `-` over neither, "
    "`·` was not run."
)


def load() -> Any:
    """What the last run found."""
    return json.loads(RESULTS.read_text())


def cell(server: Mapping[str, Any], name: str) -> str:
    """The sign of one check of one server."""
    found = server["checks"].get(name, {})
    passed = {over for over, each in found.items() if each["status"] == "passed"}
    if passed == {"json", "query"}:
        return "+"
    if passed:
        return "J" if "json" in passed else "Q"
    return "-" if any(each["status"] == "failed" for each in found.values()) else "·"


def kept_by(server: Mapping[str, Any], checks: Sequence[Check]) -> int:
    """How many of these rules hold over at least one of the protocols."""
    return sum(cell(server, each.name) in "+JQ" for each in checks)


def _not_run(server: Mapping[str, Any]) -> int:
    return sum(cell(server, name) == "·" for name in CHECKS)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def _within(title: str) -> str:
    """A title within a sentence."""
    return title if title[1].isupper() else title[0].lower() + title[1:]


def _of(feature: str) -> list[Check]:
    return [each for each in CHECKS.values() if each.feature == feature]


def overview(found: Mapping[str, Any]) -> str:
    """The page with the counts."""
    servers = found["servers"]
    lines = [
        "# Parity with Amazon SQS",
        "",
        f"{len(CHECKS)} rules of Amazon's documentation, each asked over JSON and over the Query",
        "protocol by `penstock.testing.sqs`, of every server with this API that a package registry",
        f"has. Made on {found['date']} by `make parity` from `benchmarks/results/parity.json`.",
        "A rule is counted if it holds over at least one of the two protocols. The pages with",
        "every cell say over which, and why ours fails where it does:",
        ", ".join(f"[{_within(title)}]({page.name})" for page, (title, _) in ROWS.items()) + ".",
        "",
        *_table(
            ["", *servers],
            [
                ["version", *(each["version"] for each in servers.values())],
                *(
                    [
                        f"{feature} ({len(_of(feature))})",
                        *(str(kept_by(each, _of(feature))) for each in servers.values()),
                    ]
                    for _, features in ROWS.values()
                    for feature in features
                ),
                [
                    f"**all ({len(CHECKS)})**",
                    *(f"**{kept_by(each, [*CHECKS.values()])}**" for each in servers.values()),
                ],
                ["not run", *(str(_not_run(each)) for each in servers.values())],
            ],
        ),
        "",
        "## The servers",
        "",
        *_table(
            ["", "from", "what ran"],
            [
                [name, f"{each['registry']}, {each['version']}", each["note"]]
                for name, each in servers.items()
            ],
        ),
        "",
        "Not run:",
        "",
        *_table(["", "why"], [[name, why] for name, why in found["absent"].items()]),
        *_explained(found),
    ]
    return "\n".join(lines) + "\n"


def _explained(found: Mapping[str, Any]) -> list[str]:
    return [
        "",
        "## How to read it",
        "",
        "The checks were written for Penstock by those who wrote Penstock, from Amazon's",
        "documentation and API model; Amazon SQS itself was not asked. They compare codes and",
        "fields, not the texts of errors. Servers for tests leave rules out on purpose, such as",
        "the 60 seconds after a deletion. A server without a movable clock was given real time, up",
        "to ten seconds, so the checks that need a minute or more were not run. Sixteen checks",
        f"ran at once on a busy machine ({found['load']}).",
        "What failed on a peer ran again, three at once, and the better result counts.",
        "",
        "## Check a server of your own",
        "",
        "With Penstock and boto3 installed, of any address:",
        "",
        "```text",
        "python -m penstock.testing.sqs --endpoint-url http://127.0.0.1:9324 --json found.json",
        "```",
        "",
        "It is a program and not a suite of pytest: the servers are written in any language, and",
        "most checks wait, which they do at the same time, in threads. `--only WORDS` chooses",
        "checks, `--protocol json` one protocol, `--wait-max 310` adds those that wait for",
        "minutes. A Penstock with `--clock manual` is not waited for: its clock is moved.",
        "The exit status is 1 if a check failed.",
    ]


def rows(found: Mapping[str, Any], page: Path) -> str:
    """A page of cells."""
    servers = found["servers"]
    title, features = ROWS[page]
    lines = [
        f"# Parity: {_within(title)}",
        "",
        f"Every cell of [parity with Amazon SQS](parity.md), {found['date']}. {LEGEND}",
    ]
    numbers = [f"{number}" for number, _ in enumerate(servers, 1)]
    named = ", ".join(f"{number} {name}" for number, name in zip(numbers, servers, strict=True))
    lines += ["", f"The servers: {named}."]
    for feature in features:
        lines += ["", f"## {feature[0].upper()}{feature[1:]}", ""]
        lines += _table(
            ["", *numbers],
            [
                [each.sentence, *(cell(server, each.name) for server in servers.values())]
                for each in _of(feature)
            ],
        )
        lines += _misses(servers[OURS], _of(feature))
    return "\n".join(lines) + "\n"


def _misses(server: Mapping[str, Any], checks: Sequence[Check]) -> list[str]:
    return [
        f"\n{OURS} over {over}, {each.sentence}: {result['reason']}"
        for each in checks
        for over, result in server["checks"].get(each.name, {}).items()
        if result["status"] == "failed"
    ]


def compatibility(found: Mapping[str, Any]) -> list[str]:
    """The table of what our own endpoint keeps, for its page."""
    ours = found["servers"][OURS]
    listed = [
        (feature, len(_of(feature)), sum(cell(ours, each.name) == "+" for each in _of(feature)))
        for _, features in ROWS.values()
        for feature in features
    ]
    whole = ", ".join(f"{feature} ({count})" for feature, count, kept in listed if kept == count)
    rest = [[feature, f"{kept} of {count}"] for feature, count, kept in listed if kept < count]
    total = sum(kept for _, _, kept in listed)
    return [
        f"Of {len(CHECKS)} rules of Amazon's documentation {total} hold over both protocols",
        f"({found['date']}, [every cell, and other servers](../reference/parity.md)):",
        "",
        *_table(["", "rules that hold"], [[whole, "all"], *rest]),
    ]


def readme_row(found: Mapping[str, Any]) -> str:
    """The row of README's comparison that the checks found."""
    counts = []
    for name in README_COLUMNS:
        server = found["servers"].get(name)
        if server is None:
            counts.append("not run")
        else:
            checks = [each for each in CHECKS.values() if cell(server, each.name) != "·"]
            which = "" if name == OURS else f" ({server['version']})"
            counts.append(f"{kept_by(server, checks)} of {len(checks)}{which}")
    label = "[rules of Amazon SQS](docs/reference/parity.md) kept, of those asked for"
    return "| " + " | ".join([label, *counts]) + " |"


def pages(found: Mapping[str, Any]) -> dict[Path, str]:
    """Every file that is made from the results, whole."""
    made = {OVERVIEW: overview(found), **{page: rows(found, page) for page in ROWS}}
    sqs = ROOT / "docs/how-to/sqs.md"
    block = "\n".join([BEGIN, *compatibility(found), END])
    made[sqs] = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, sqs.read_text(), flags=re.DOTALL
    )
    readme = ROOT / "README.md"
    pattern = r"^\| \[rules of Amazon SQS\]\(docs/reference/parity\.md\).*$"
    made[readme] = re.sub(
        pattern, lambda _: readme_row(found), readme.read_text(), flags=re.MULTILINE
    )
    return made


def write_pages(found: Mapping[str, Any]) -> None:
    """Writes them."""
    for path, text in pages(found).items():
        path.write_text(text)
