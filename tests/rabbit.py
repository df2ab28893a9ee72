"""A RabbitMQ broker for the tests: on free ports, with a node name and directories of its own.

One broker serves every test of a run (the fixture `rabbit`), because starting one takes seconds.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.ports import lasting_port

TIMEOUT_S = 90
# Never set: its `wait` is the pause between two checks of a server that starts or ends.
PAUSE = threading.Event()
# Debian's script, without the part that requires root or the user rabbitmq.
PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
# Plugins that no test uses: the broker would read the description of each of them as it starts.
UNUSED = ("accept", "amqp10", "base64url", "cow", "eetcd", "gun", "jose", "jsx", "prom", "quantile")
# The broker in a session of its own, which is killed when the process that started it has ended.
GUARDED = """
exec 3<&0
(read -r _ <&3; kill -KILL 0) &
exec "$0" </dev/null 3<&-
"""
CONFIGURATION = """
listeners.tcp.1 = 127.0.0.1:{port}
log.file.level = error
vm_memory_high_watermark.absolute = 1GB
disk_free_limit.absolute = 10MB
"""
CLUSTER = """
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.classic_config.nodes.1 = {node}
"""
TLS = """
listeners.ssl.1 = 127.0.0.1:{port}
ssl_options.cacertfile = {directory}/cert.pem
ssl_options.certfile = {directory}/cert.pem
ssl_options.keyfile = {directory}/key.pem
ssl_options.verify = verify_none
"""
CERTIFICATE = [
    *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
    *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
]


def free_ports(count):
    """Ports at which no process listens, and which Linux does not assign."""
    with ExitStack() as taken:
        ports = []
        for _ in range(count):
            ports.append(lasting_port())
            taken.enter_context(socket.create_server(("127.0.0.1", ports[-1])))
        return ports


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Broker:
    """A RabbitMQ that can be stopped, killed, stalled and started again at the same port.

    With `beside`, a running broker, it is another node of the same cluster.
    """

    def __init__(self, directory, beside=None):
        self.directory = Path(directory)
        self.port, self.tls_port, self._dist_port, self._epmd_port = free_ports(4)
        self.node = f"penstock{self.port}@localhost"
        self._process: Any = None
        home = self.directory / "home"
        home.mkdir()
        if beside is not None:
            self._epmd_port = beside._epmd_port
            cookie = home / ".erlang.cookie"
            shutil.copy(beside.directory / "home" / ".erlang.cookie", cookie)
            cookie.chmod(0o400)
        (self.directory / "enabled_plugins").write_text("[].\n")
        configuration = CONFIGURATION.format(port=self.port)
        if beside is not None:
            configuration += CLUSTER.format(node=beside.node)
        if shutil.which("openssl"):
            made = ["-keyout", self.directory / "key.pem", "-out", self.certificate]
            subprocess.run([*CERTIFICATE, *made], check=True, capture_output=True)
            configuration += TLS.format(port=self.tls_port, directory=self.directory)
        (self.directory / "rabbitmq.conf").write_text(configuration)
        self._link_plugins()

    def _link_plugins(self):
        (self.directory / "plugins").mkdir()
        for plugin in PROGRAM.parent.parent.glob("lib/*/plugins/*"):
            is_extra = plugin.name.startswith(("rabbitmq_", *UNUSED))
            if not is_extra or plugin.name.startswith("rabbitmq_prelaunch"):
                (self.directory / "plugins" / plugin.name).symlink_to(plugin)

    @property
    def certificate(self):
        """The certificate for TLS; there is none if openssl is not installed."""
        return self.directory / "cert.pem"

    @property
    def url(self):
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def start(self):
        """Starts it, and waits until it takes connections."""
        where = self.directory
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(where / "home"),
            "LANG": "C.UTF-8",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(where / "mnesia"),
            "RABBITMQ_LOG_BASE": str(where / "log"),
            "RABBITMQ_CONFIG_FILE": str(where / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(where / "enabled_plugins"),
            "RABBITMQ_PLUGINS_DIR": str(where / "plugins"),
            "RABBITMQ_PID_FILE": str(where / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        }
        self._environment = environment
        with (where / "output").open("ab") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", GUARDED, PROGRAM],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        give_up_s = time.monotonic() + TIMEOUT_S
        while not _listens(self.port):
            printed = (where / "output").read_text(errors="replace")
            assert self._process.poll() is None, f"RabbitMQ did not start: {printed}"
            assert time.monotonic() < give_up_s, f"RabbitMQ did not start in time: {printed}"
            PAUSE.wait(0.02)
        return self

    def control(self, *words):
        """Runs `rabbitmqctl` for this node."""
        command = [PROGRAM.parent / "rabbitmqctl", "-n", self.node, *words]
        subprocess.run(command, env=self._environment, check=True, capture_output=True)

    def send(self, which):
        """Sends a signal to all its processes; SIGSTOP has taken effect when this returns."""
        os.killpg(self._process.pid, which)
        if which == signal.SIGSTOP:
            while any(state not in "TZ" for state in self._states()):
                PAUSE.wait(0.01)

    def _states(self):
        """The state of each thread of its processes, as in /proc."""
        for path in Path("/proc").glob("[0-9]*/task/*/stat"):
            with suppress(OSError):
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._process.pid:
                    yield state

    def stop(self, how=signal.SIGTERM):
        """Ends it by this signal; its messages stay on the disk."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self.send(how)
            self.send(signal.SIGCONT)
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                self.send(signal.SIGKILL)
            self._process.stdin.close()
            self._process = None
        # The script has ended; the Erlang virtual machine may take longer.
        give_up_s = time.monotonic() + TIMEOUT_S
        while any(map(_listens, (self.port, self._dist_port))):
            assert time.monotonic() < give_up_s, "RabbitMQ does not end"
            PAUSE.wait(0.02)

    def end(self, *, is_last=True):
        """Kills it, and ends the port mapper if this is the last node that uses it."""
        self.stop(signal.SIGKILL)
        if not is_last:
            return
        give_up_s = time.monotonic() + TIMEOUT_S
        # The port mapper refuses to end while the broker is registered with it.
        while time.monotonic() < give_up_s:
            ended = subprocess.run(
                ["epmd", "-kill"], env=self._environment, capture_output=True, check=False
            )
            if b"Killed" in ended.stdout:
                return
            PAUSE.wait(0.05)


@contextmanager
def shared_broker():
    """A broker with a directory of its own, until the end."""
    directory = tempfile.mkdtemp(prefix="penstock-rabbit-")
    broker = Broker(directory)
    try:
        yield broker.start()
    finally:
        broker.end()
        shutil.rmtree(directory, ignore_errors=True)
