"""The short-lived program between the node agent and a container's process: `python -S -m aerie_lab.sandbox.launch`.

    launch.py run FILE     start what FILE (see `LaunchSpec` in container.py) describes, in new namespaces
    launch.py enter FILE   run a command in the namespaces of a running container (exec probes, preStop hooks)

`run` forks once: the child is process 1 of the container's PID namespace and becomes the container's command; this
program reports the child's process id on the report pipe and ends, which hands the child to the node agent (a
subreaper). The report pipe closes when the command is executed, so its reader knows a start from a failure:

    "pid 123\n" then end of file          running
    "pid 123\n" "error <sentence>\n"      the command could not be started

Guarantees: nothing of this program stays behind (no shim process per container); a container ends with the node agent,
however that ends. Every container and every exec probe pays for what is imported here, so that is little: FILE is in
Python's own marshal format, which needs no import beyond the interpreter's, and both sides are the same interpreter.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import sys

from . import linux, rootfs

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` alone would cost as much as all the rest
    from typing import Any


def run_container(spec: dict[str, Any]) -> None:
    """Start the container; returns in the launcher only."""
    report = int(spec["report_fd"])
    os.set_inheritable(report, False)
    launcher = os.pidfd_open(os.getpid())
    if spec["network_fd"] is not None:
        linux.setns(int(spec["network_fd"]), linux.CLONE_NEWNET)
        os.close(int(spec["network_fd"]))
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC)
    child = os.fork()
    if child:
        os.write(report, f"pid {child}\n".encode())
        return
    try:
        os.setsid()
        linux.set_hostname(spec["hostname"])
        mounts = [(m["source"], m["path"], m["read_only"]) for m in spec["mounts"]]
        rootfs.enter_container_root(mounts, spec["read_only_root"], spec["shared_memory"])
        _make_working_directory(spec["working_directory"])
        _die_with_agent(launcher, report)
        _execute(spec)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        os.write(report, f"error {error.strerror}:{where}\n".encode())
    except ValueError as error:  # a zero byte in the command or the environment
        os.write(report, f"error {error}\n".encode())
    os._exit(128)


def _die_with_agent(launcher: int, report: int) -> None:
    """Let this process end with the node agent.

    The signal is bound to the parent, and the parent is the agent only once the launcher has ended; from then on the
    launcher's pidfd is readable. An agent that ended before has closed the report pipe.
    """
    waiting = select.poll()
    waiting.register(launcher, select.POLLIN)
    waiting.poll()
    linux.die_with_parent()
    listening = select.poll()
    listening.register(report, 0)
    if any(state & select.POLLERR for _, state in listening.poll(0)):
        os._exit(128)


def _make_working_directory(path: str) -> None:
    try:  # noqa: SIM105  contextlib would have to be imported
        os.makedirs(path, exist_ok=True)
    except OSError:
        pass  # a read-only root: changing into it will fail with the reason


def run_in_container(spec: dict[str, Any]) -> int:
    """Run the command inside the container; returns its exit code (128 + signal when killed)."""
    folder = f"/proc/{spec['pid']}/ns"
    kinds = (
        ("ipc", linux.CLONE_NEWIPC),
        ("uts", linux.CLONE_NEWUTS),
        ("net", linux.CLONE_NEWNET),
        ("pid", linux.CLONE_NEWPID),
        ("mnt", linux.CLONE_NEWNS),
    )
    handles = [(os.open(f"{folder}/{name}", os.O_RDONLY), kind) for name, kind in kinds]
    for handle, kind in handles:
        linux.setns(handle, kind)
        os.close(handle)
    child = os.fork()
    if child == 0:
        try:
            _execute(spec)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
        os._exit(127)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _execute(spec: dict[str, Any]) -> None:
    os.chdir(spec["working_directory"])
    # Python ignores SIGPIPE and SIGXFSZ; a container's command must not inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execvpe(spec["command"][0], spec["command"], spec["environment"])


def main() -> int:
    """See the module's docstring."""
    verb, path = sys.argv[1:]
    with open(path, "rb") as file:
        spec = marshal.load(file)  # noqa: S302  our own file, written a moment ago
    if verb == "enter":
        return run_in_container(spec)
    run_container(spec)
    os._exit(0)  # immediately: the container waits for it


if __name__ == "__main__":
    sys.exit(main())
