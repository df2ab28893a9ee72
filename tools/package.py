"""Builds the wheel and the source archive into dist/, and tries the wheel as a new user would.

`make package`. The wheel is installed into an empty environment, with the core dependencies only;
then the time to import it, of `penstock --help` and of the first answer of `penstock serve`, and
the idle memory of that server, are printed beside their goals. A step that fails ends with status
1; a goal that is missed is printed, because a busy machine misses any.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import urlopen

ROOT: Final = Path(__file__).parents[1]
SBOM: Final = ROOT / "sbom.cdx.json"
TWINE: Final = "twine>=6,<8"
ROUNDS: Final = 5
GOALS: Final = {"import": 0.15, "penstock --help": 0.3, "penstock serve answers": 0.3}


def bill_of_materials() -> str:
    """What the wheel needs, as CycloneDX: the wheel itself contains nothing but this project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    needed = {re.split(r"[<>=\[]", each)[0]: each for each in project["dependencies"]}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": own,
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}",
                "name": name,
                "purl": f"pkg:pypi/{name}",
                "scope": "required",
                "properties": [{"name": "penstock:requirement", "value": requirement}],
            }
            for name, requirement in needed.items()
        ],
        "dependencies": [
            {"ref": own, "dependsOn": [f"pkg:pypi/{name}" for name in needed]},
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def build(directory: Path) -> tuple[Path, Path]:
    """Builds both archives and returns the wheel and the source."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    (source,) = directory.glob("*.tar.gz")
    return wheel, source


def install(directory: Path, *requirements: str) -> Path:
    """Makes an environment with these packages and what they require; returns its `bin`."""
    binaries = directory / "bin"
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(binaries / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", *requirements], check=True)
    return binaries


def measure(binaries: Path, directory: Path) -> dict[str, float]:
    """The median seconds of each goal, and the idle memory of a server in MiB."""
    found = {
        "import": seconds_of(binaries / "python", "-c", "import penstock"),
        "penstock --help": seconds_of(binaries / "penstock", "--help"),
    }
    starts = [first_answer(binaries, directory / str(number)) for number in range(ROUNDS)]
    found["penstock serve answers"] = statistics.median(seconds for seconds, _ in starts)
    found["idle memory"] = statistics.median(mebibytes for _, mebibytes in starts)
    return found


def environment() -> dict[str, str]:
    """The environment without what would reach into this checkout."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}


def seconds_of(program: Path, *arguments: str) -> float:
    def once() -> float:
        begun = time.perf_counter()
        command = [str(program), *arguments]
        subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun

    once()
    return statistics.median(once() for _ in range(ROUNDS))


def first_answer(binaries: Path, data: Path) -> tuple[float, float]:
    """How long a new server took to answer a request, and its resident memory then, in MiB."""
    begun = time.perf_counter()
    command = [str(binaries / "penstock"), "serve", "--json", "--port", "0", "--data", str(data)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            started: dict[str, Any] = json.loads(server.stdout.readline())
            try:
                urlopen(f"{started['url']}/health", timeout=30).close()
            except HTTPError as error:
                raise SystemExit(f"penstock serve answered {error.code} to /health") from error
            seconds = time.perf_counter() - begun
            status = Path(f"/proc/{server.pid}/status").read_text()
            kibibytes = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
            return seconds, kibibytes / 1024
        finally:
            server.terminate()


def main() -> None:
    SBOM.write_text(bill_of_materials())
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    wheel, source = build(dist)
    for path in (wheel, source):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:,.0f} KiB")
    with tempfile.TemporaryDirectory() as scratch:
        # In an environment of its own: it needs a newer docutils than awscli allows.
        checker = install(Path(scratch, "twine"), TWINE) / "twine"
        subprocess.run([checker, "check", "--strict", wheel, source], check=True)
        binaries = install(Path(scratch, "environment"), str(wheel))
        for name, value in measure(binaries, Path(scratch)).items():
            if (goal := GOALS.get(name)) is None:
                print(f"{name}: {value:.0f} MiB")
            else:
                met = "met" if value <= goal else "not met"
                print(f"{name}: {value:.3f} s (goal {goal} s: {met})")


if __name__ == "__main__":
    main()
