"""Two network namespaces with a shaped link between them, and processes inside them.

Needs root, iproute2's `ip` and /dev/net/tun. The link is `_link_relay.py`, since kernels often come
without netem. Everything is gone when the block ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

HOME_ADDRESS, FAR_ADDRESS = "10.77.19.1", "10.77.19.2"
"""Of the trainer and its store, and of the replicas."""


class Child:
    """A process that answers lines of JSON with lines of JSON."""

    def __init__(
        self, command: Sequence[str], log: IO[bytes], namespace: str | None = None
    ) -> None:
        inside = [] if namespace is None else ["ip", "netns", "exec", namespace]
        self._process = subprocess.Popen(
            [*inside, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def tell(self, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next line; RuntimeError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, **message: Any) -> Any:
        self.tell(**message)
        return self.hear()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


class Network:
    """Namespaces `home` and `far`, and the link between them."""

    def __init__(self, home: str, far: str, link: Child, folder: Path) -> None:
        self.home = home
        self.far = far
        self._link = link
        self._folder = folder

    def link_bytes(self) -> int:
        """Bytes that went from home to far so far, headers of IP and TCP included."""
        return int(self._link.ask()["bytes"][0])

    @contextmanager
    def process(self, name: str, namespace: str, command: Sequence[str]) -> Iterator[Child]:
        with (self._folder / f"{name}.log").open("wb") as log:
            child = Child(command, log, namespace)
            try:
                yield child
            finally:
                child.end()

    @contextmanager
    def python(self, namespace: str, module: str, *args: object) -> Iterator[Child]:
        """`python -m benchmarks.MODULE ARGS` in a namespace."""
        command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, args)]
        name = "-".join([module.strip("_"), *(str(arg) for arg in args[:1] if str(arg).isdigit())])
        with self.process(name, namespace, command) as child:
            yield child


def check_machine() -> None:
    """SystemExit, saying what is missing, unless the network can be set up here."""
    missing = []
    if os.geteuid() != 0:
        missing.append("root")
    if not Path("/dev/net/tun").exists():
        missing.append("/dev/net/tun (the kernel's TUN devices)")
    if not any((Path(place) / "ip").exists() for place in os.get_exec_path()):
        missing.append("`ip` (iproute2)")
    if missing:
        raise SystemExit(f"benchmarks.link sets up network namespaces: it needs {missing}")


@contextmanager
def network(folder: Path, mbit_s: float, rtt_ms: float) -> Iterator[Network]:
    home, far = (f"stitch-{end}-{os.getpid()}" for end in ("home", "far"))
    devices = (f"st{os.getpid()}h", f"st{os.getpid()}f")
    with contextlib.ExitStack() as stack:
        for namespace in (home, far):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        log = stack.enter_context((folder / "relay.log").open("wb"))
        command = [sys.executable, "-m", "benchmarks._link_relay", *devices]
        link = Child([*command, str(mbit_s), str(rtt_ms / 2)], log)
        stack.callback(link.end)
        link.hear()
        ends = zip((home, far), devices, (HOME_ADDRESS, FAR_ADDRESS), strict=True)
        for namespace, device, address in ends:
            _ip("link", "set", device, "netns", namespace)
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", namespace, "link", "set", device, "up", "mtu", "1500")
        yield Network(home, far, link, folder)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
