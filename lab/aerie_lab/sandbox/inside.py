"""Runs a command inside a lab's namespaces: `python -m aerie_lab.sandbox.inside PID COMMAND...`; PID is the lab's process 1.

With `--network` first, the command shares only the lab's network, and takes this process' place: it keeps its number, its files
and its signals.
"""

from __future__ import annotations

import os
import sys

from aerie_lab.sandbox import linux

_NETWORK_NAMESPACE = ("net", linux.CLONE_NEWNET)
_NAMESPACES = (
    ("user", linux.CLONE_NEWUSER),
    _NETWORK_NAMESPACE,
    ("ipc", linux.CLONE_NEWIPC),
    ("pid", linux.CLONE_NEWPID),
    ("mnt", linux.CLONE_NEWNS),
)


def main() -> int:
    """Enter, run, and hand back the exit code."""
    words = sys.argv[1:]
    network = words[0] == "--network"
    process, *command = words[1:] if network else words
    own_user = os.readlink("/proc/self/ns/user")
    where = os.getcwd()
    handles = []
    for name, kind in _NAMESPACES[: _NAMESPACES.index(_NETWORK_NAMESPACE) + 1] if network else _NAMESPACES:
        path = f"/proc/{process}/ns/{name}"
        if name != "user" or os.readlink(path) != own_user:  # a process may not enter the user namespace it is in
            handles.append((os.open(path, os.O_RDONLY | os.O_CLOEXEC), kind))
    for handle, kind in handles:
        linux.setns(handle, kind)
    if network:
        os.execvp(command[0], command)
    child = os.fork()  # the PID namespace takes effect for children
    if child == 0:
        try:
            os.chdir(where)
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
