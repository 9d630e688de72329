"""The same program in several processes: `jax.distributed`, and a launcher for one machine.

Every process runs the whole script, with some of the devices; a partitioned program runs on all of them
together, and waits for all of them.  So a process that dies leaves the others waiting.  Two things end
the job then: the launcher, which sees it at once, stops the others and says what happened; and without
it (processes on machines of their own) the coordinator, which misses the dead process's heartbeat and
ends the others within `HEARTBEAT_SECONDS`.  The next run goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from shardwise.demo import devices

COORDINATOR, PROCESSES, PROCESS, HEARTBEAT = (
    f"SHARDWISE_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS", "HEARTBEAT_SECONDS")
)
"""Environment variables of a process: the coordinator's host:port, how many there are, its number, and
how long a process may be silent (`HEARTBEAT_SECONDS` if not set)."""

HEARTBEAT_SECONDS = 30
_STOP_SECONDS = 5


def named() -> bool:
    """Whether the environment says that this process is one of a job's."""
    return COORDINATOR in os.environ


def joined() -> bool:
    """Joins the job that the environment names; False if it names none.

    To be called before JAX starts.  It waits for all processes.
    """
    if not named():
        return False
    import jax

    jax.distributed.initialize(
        os.environ[COORDINATOR],
        int(os.environ[PROCESSES]),
        int(os.environ[PROCESS]),
        heartbeat_timeout_seconds=int(os.environ.get(HEARTBEAT, HEARTBEAT_SECONDS)),
    )
    return True


def launch(
    command: Sequence[str],
    processes: int,
    devices_each: int,
    hint: Callable[[], str] = lambda: "",
) -> int:
    """Runs a command in several processes on this machine, on virtual CPU devices.

    Args:
      command: calls `joined()` before JAX starts.
      hint: added to the message when a process dies; called then.

    Returns:
      0 when all ended well; otherwise 1, or the exit status of the first that did not.
    """
    address = f"127.0.0.1:{_free_port()}"
    devices.ask_for(devices_each)
    running = []
    for i in range(processes):
        env = os.environ | {COORDINATOR: address, PROCESSES: str(processes), PROCESS: str(i)}
        running.append(subprocess.Popen(command, env=env))
    with _ended_by_a_signal():
        try:
            first = _first_failure(running)
        except BaseException:
            _stop(running)
            raise
    if first is None:
        return 0
    status = running[first].returncode
    _stop(running)
    print(
        f"shardwise: error: process {first} of {processes} {_ended(status)}; "
        f"the others were stopped.{' ' if hint() else ''}{hint()}",
        file=sys.stderr,
    )
    return status if status > 0 else 1


@contextlib.contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """SIGTERM becomes an exit that the launcher can clean up after: no process outlives it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the clean-up must end
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_failure(running: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all have ended well, or one has not: its number."""
    while True:
        codes = [p.poll() for p in running]
        # Of several at once, the one that was killed is the cause and the others its effect.
        failed = sorted((code > 0, i) for i, code in enumerate(codes) if code)
        if failed:
            return failed[0][1]
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)


def _stop(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes; JAX may take SIGTERM for a notice and go on: then they are killed."""
    for p in running:
        if p.poll() is None:
            p.terminate()
    end = time.monotonic() + _STOP_SECONDS
    for p in running:
        try:
            p.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
