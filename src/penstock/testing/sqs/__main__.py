"""`python -m penstock.testing.sqs --endpoint-url URL`: the table of what a server keeps."""

import argparse
import json
import sys
from pathlib import Path

from penstock.output import print_text
from penstock.testing.sqs import CHECKS, CheckedServer, Result, run_checks
from penstock.testing.sqs.target import PROTOCOLS, Protocol, movable_clock

_THREADS = 16


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks, prints those that fail; 1 if any does."""
    parser = argparse.ArgumentParser(prog="python -m penstock.testing.sqs", description=__doc__)
    parser.add_argument("--endpoint-url", required=True, metavar="URL")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write every result there")
    parser.add_argument("--protocol", choices=PROTOCOLS, help="only one of the two")
    parser.add_argument("--only", metavar="WORDS", default="", help="checks with these words")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--access-key", default="any")
    parser.add_argument("--secret-key", default="any")
    parser.add_argument(
        "--wait-max",
        type=float,
        metavar="SECONDS",
        default=10.0,
        help="leave out checks that wait longer, unless the clock can be moved (%(default)s)",
    )
    given = parser.parse_args(arguments)
    protocols: tuple[Protocol, ...] = (given.protocol,) if given.protocol else PROTOCOLS
    chosen = [each for each in CHECKS.values() if given.only in each.sentence]
    if not chosen:
        parser.error(f"no check has the words {given.only!r}")
    account = given.access_key if given.access_key.isdigit() else ""
    advance = movable_clock(given.endpoint_url, account)

    def target(protocol: Protocol) -> CheckedServer:
        return CheckedServer(
            given.endpoint_url,
            protocol,
            region=given.region,
            access_key=given.access_key,
            secret_key=given.secret_key,
            advance=advance,
        )

    results = run_checks(
        target,
        chosen,
        protocols=protocols,
        wait_s_max=float("inf") if advance else given.wait_max,
        threads=1 if advance else _THREADS,
    )
    if given.json is not None:
        given.json.write_text(json.dumps([each._asdict() for each in results], indent=1) + "\n")
    for line in _lines(results):
        print_text(line)
    return 1 if any(each.status == "failed" for each in results) else 0


def _lines(results: list[Result]) -> list[str]:
    lines = []
    features = dict.fromkeys(CHECKS[each.name].feature for each in results)
    for feature in features:
        found = [each for each in results if CHECKS[each.name].feature == feature]
        passed = sum(each.status == "passed" for each in found)
        lines.append(f"{feature}: {passed} of {len(found)}")
        lines += [
            f"  {each.status} over {each.protocol}: {CHECKS[each.name].sentence}: {each.reason}"
            for each in found
            if each.status != "passed"
        ]
    counts = {
        status: sum(each.status == status for each in results)
        for status in ("passed", "failed", "not run")
    }
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items()))
    return lines


if __name__ == "__main__":
    sys.exit(main())
