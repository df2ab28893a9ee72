"""The SQS servers that `benchmarks.sqs` compares: how to install, start, call and stop each.

    | server              | protocol | keeps its messages                    |
    |---------------------|----------|---------------------------------------|
    | Penstock, in memory | JSON     | in memory                             |
    | Penstock, durable   | JSON     | on the disk, synced before the answer |
    | fauxqs              | JSON     | in memory                             |
    | ElasticMQ           | Query    | in memory                             |
    | ministack           | JSON     | in memory                             |
    | moto_server         | JSON     | in memory                             |
    | bare loop           | JSON     | not at all                            |

Each runs as its documentation describes, without output for each request where that is possible.
"""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from benchmarks.harness import PEERS, peer_lack

MEMORY = "penstock, memory"
DURABLE = "penstock, durable"
BARE = "bare loop"
# An upper limit only: a JVM on a busy machine takes long.
START_S_MAX = 120.0
STOP_S_MAX = 10.0
# The last boto3 with the Query protocol for SQS, for the server that has no other.
OLD_BOTO3 = "boto3-query"
OLD_BOTO3_REQUIREMENTS = ("boto3>=1.28,<1.29", "botocore<1.31.81")

_AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/sqs/aws4_request, "
    f"SignedHeaders=host;x-amz-date, Signature={'0' * 64}"
)


class Absent(Exception):
    """A server is not available here, for this reason."""


class Kind(NamedTuple):
    """One of the servers."""

    # The command and additions to the environment, for a port and a directory.
    command: Callable[[int, Path], tuple[list[str], dict[str, str]]]
    # Installs what it needs; returns the reason if that fails, else "".
    lack: Callable[[], str] = lambda: ""
    protocol: str = "json"
    keeps_messages: bool = True
    # Whether a message that was deleted is still counted among those in flight.
    counts_deleted: bool = False
    # How long a request may continue after its client has disconnected.
    settle_s: float = 0.02


def penstock_command(port: int, store: str) -> tuple[list[str], dict[str, str]]:
    """How `penstock serve` is started, for a port and a store."""
    program = str(Path(sys.executable).with_name("penstock"))
    return [program, "serve", "--port", str(port), "--store", store], {}


def _bare(port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "benchmarks.sqs_bare", str(port)], {}


def _fauxqs(port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    module = PEERS / "fauxqs/node_modules/fauxqs/dist/app.js"
    # Its command prints every request; the function that it calls can be configured not to.
    start = f"import({json.dumps(str(module))}).then(m => m.startFauxqs({{logger: false}}))"
    # It needs a newer Node than Debian has; npm has Node, too.
    node = str(PEERS / "fauxqs/node_modules/node/bin/node")
    return [node, "-e", start], {"FAUXQS_PORT": str(port)}


def _elasticmq(port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    (jar,) = (PEERS / "elasticmq/node_modules/elasticmq").glob("*.jar")
    opens = []
    for package in ("java.base/java.util.regex", "java.base/java.lang"):
        opens += ["--add-opens", f"{package}=ALL-UNNAMED"]
    settings = [f"-Dnode-address.port={port}", f"-Drest-sqs.bind-port={port}"]
    return ["java", *opens, *settings, "-jar", str(jar)], {}


def _ministack(port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "ministack.app"], {
        "PYTHONPATH": str(PEERS / "ministack"),
        "GATEWAY_PORT": str(port),
        "BIND_HOST": "127.0.0.1",
        "SERVICES": "sqs",
        "LOG_LEVEL": "ERROR",
    }


def _moto(port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    path = str(PEERS / "moto-server")
    return [sys.executable, "-m", "moto.server", "-p", str(port)], {"PYTHONPATH": path}


def _elasticmq_lack() -> str:
    return peer_lack("elasticmq", ["elasticmq@0.7"], npm=True) or peer_lack(
        OLD_BOTO3, OLD_BOTO3_REQUIREMENTS
    )


KINDS: Mapping[str, Kind] = {
    MEMORY: Kind(lambda port, directory: penstock_command(port, "memory:")),
    DURABLE: Kind(lambda port, directory: penstock_command(port, f"file:{directory}/data")),
    "fauxqs": Kind(_fauxqs, lambda: peer_lack("fauxqs", ["fauxqs@>=2 <3", "node@22"], npm=True)),
    "ElasticMQ": Kind(
        _elasticmq, _elasticmq_lack, protocol="query", counts_deleted=True, settle_s=0.1
    ),
    "ministack": Kind(_ministack, lambda: peer_lack("ministack", ["ministack>=1.5,<2"])),
    "moto_server": Kind(
        _moto, lambda: peer_lack("moto-server", ["moto[server,sqs]>=5.1,<6"]), settle_s=0.2
    ),
    BARE: Kind(_bare, keeps_messages=False),
}
PEER_NAMES = ("fauxqs", "ElasticMQ", "ministack", "moto_server")


class Depth(NamedTuple):
    """How many messages of a queue can be received now, and how many there are."""

    visible: int
    total: int


class PeerServer:
    """A running server."""

    def __init__(self, name: str, directory: Path, kind: Kind | None = None) -> None:
        self.name = name
        self.kind = kind or KINDS[name]
        lack = self.kind.lack()
        if lack:
            raise Absent(lack)
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command, environment = self.kind.command(self.port, directory)
        self._output = directory / "output"
        self.started_s = time.perf_counter()
        try:
            with open(self._output, "wb") as output:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            raise Absent(f"cannot start {command[0]}: {error.strerror}") from None
        self._link = ServerLink(self.port)
        try:
            self.start_s = self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def _wait_until_it_answers(self) -> float:
        """The seconds from its start to its first answer. Raises Absent."""
        while True:
            took_s = time.perf_counter() - self.started_s
            try:
                with socket.create_connection(("127.0.0.1", self.port), START_S_MAX):
                    pass
                if self.kind.keeps_messages:
                    self.ask("ListQueues", {})
                return time.perf_counter() - self.started_s
            except OSError:
                self._link.close()
            if self._process.poll() is not None or took_s > START_S_MAX:
                output = self._output.read_text(errors="replace").strip()[-300:]
                raise Absent(f"it does not answer; its output: {output or 'none'}")
            time.sleep(0.002)

    def ask(self, action: str, parameters: Mapping[str, Any], path: str = "/") -> str:
        """The body of the answer to a request that must succeed."""
        headers = {"Authorization": _AUTHORIZATION, "X-Amz-Date": "20260101T000000Z"}
        if self.kind.protocol == "json":
            headers["X-Amz-Target"] = f"AmazonSQS.{action}"
            headers["Content-Type"] = "application/x-amz-json-1.0"
            content = json.dumps(parameters)
        else:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            content = urlencode({"Action": action, "Version": "2012-11-05", **parameters})
        status, text = self._link.post(path, content, headers)
        if status != 200:
            raise RuntimeError(f"{self.name} answers {action} with {status}: {text[:300]}")
        return text

    def create_queue(self, name: str) -> str:
        """Creates a queue; returns its URL."""
        if not self.kind.keeps_messages:
            return f"{self.url}/000000000000/{name}"
        # Messages that a client received and did not delete must not return during a race.
        hidden_s = "43200"
        if self.kind.protocol == "json":
            attributes = {"VisibilityTimeout": hidden_s}
            answer = self.ask("CreateQueue", {"QueueName": name, "Attributes": attributes})
            return str(json.loads(answer)["QueueUrl"])
        setting = {"Attribute.1.Name": "VisibilityTimeout", "Attribute.1.Value": hidden_s}
        answer = self.ask("CreateQueue", {"QueueName": name, **setting})
        return re.findall("<QueueUrl>(.*?)</QueueUrl>", answer)[0]  # type: ignore[no-any-return]

    def delete_queue(self, url: str) -> None:
        """Deletes a queue with its messages."""
        if not self.kind.keeps_messages:
            return
        if self.kind.protocol == "json":
            self.ask("DeleteQueue", {"QueueUrl": url})
        else:
            self.ask("DeleteQueue", {}, urlsplit(url).path)

    def depth(self, url: str) -> Depth:
        """How many messages a queue reports; 0 if the server keeps none."""
        if not self.kind.keeps_messages:
            return Depth(0, 0)
        if self.kind.protocol == "json":
            answer = self.ask("GetQueueAttributes", {"QueueUrl": url, "AttributeNames": ["All"]})
            attributes = json.loads(answer)["Attributes"]
        else:
            answer = self.ask("GetQueueAttributes", {"AttributeName.1": "All"}, urlsplit(url).path)
            pairs = r"<Name>(\w+)</Name>\s*<Value>(.*?)</Value>"
            attributes = dict(re.findall(pairs, answer))
        visible, in_flight = (
            int(attributes[f"ApproximateNumberOfMessages{state}"]) for state in ("", "NotVisible")
        )
        return Depth(visible, visible + in_flight)

    def settled_depth(self, url: str) -> Depth:
        """The same, once requests whose client has disconnected are finished."""
        found = self.depth(url)
        while True:
            time.sleep(self.kind.settle_s)
            if found == (found := self.depth(url)):
                return found

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """How much processor time the process has used."""
        fields = Path(f"/proc/{self.process_id}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ends the process."""
        self._link.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S_MAX)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class ServerLink:
    """A connection to a server on this machine, which may close it when it is idle."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S_MAX)

    def post(self, path: str, content: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """The status and the body of an answer. Raises OSError.

        The server may have closed a connection that was idle, so a new one is tried as well.
        """
        for is_new in (self._connection.sock is None, True):
            try:
                self._connection.request("POST", path, content, dict(headers))
                answer = self._connection.getresponse()
                return answer.status, answer.read().decode()
            except (http.client.HTTPException, ConnectionError) as error:
                self._connection.close()
                if is_new:
                    raise ConnectionError(str(error)) from None
        raise AssertionError("the second try returns or raises")

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
