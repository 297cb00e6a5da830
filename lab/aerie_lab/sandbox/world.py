"""The lab's own world: `python -m aerie_lab.sandbox.world FOLDER NODES COMMAND...` runs COMMAND in new namespaces.

    network   nothing of the machine's; the lab's bridge and addresses (network.py)
    PID       COMMAND is process 1: when it ends, for whatever reason, the kernel ends every process of the lab
    mount     a fresh /run and /proc; what the lab mounts is seen by the lab only and goes with it
    user      only without root: this user becomes root inside, and nothing more outside

This program makes the namespaces, writes FOLDER/process.json (process id and start time of COMMAND, as the machine sees
it) before COMMAND starts, and ends. Guarantee: either process.json names the lab's process 1, or there is no such process.
Sockets that were opened before stay on the machine's side of the network: that is how the lab serves 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from aerie_lab.errors import IsolationError, LabError
from aerie_lab.sandbox import linux


def enter_new_namespaces() -> None:
    """Put this process into new namespaces. Raises IsolationError with what is missing and how to allow it."""
    flags = linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC
    user, group = os.geteuid(), os.getegid()
    try:
        linux.unshare(flags)
        return
    except PermissionError:
        pass  # not root, or root without CAP_SYS_ADMIN: a user namespace may still be allowed
    try:
        linux.unshare(flags | linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise IsolationError(
            "this user may not make namespaces, which the lab needs: run as root, or allow unprivileged user namespaces "
            "(`sysctl -w user.max_user_namespaces=10000`; on Ubuntu also `sysctl -w "
            f"kernel.apparmor_restrict_unprivileged_userns=0`; in a container, start it with --privileged). [{error.strerror}]"
        ) from error


def mount_proc_and_run() -> None:
    """Give the new mount namespace a /proc of the new PID namespace and an empty /run."""
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    try:
        linux.mount("proc", "/proc", "proc")
        linux.mount("tmpfs", "/run", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
    except OSError as error:
        raise IsolationError(
            f"the kernel rejects a mount inside the lab's namespaces ({error}): inside a container, start it with "
            "--privileged, or with --security-opt systempaths=unconfined and seccomp that allows mount."
        ) from error


def read_process_start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot (proc_pid_stat(5), field 22); None when it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def main() -> int:
    """See the module's docstring."""
    from aerie_lab.sandbox.network import set_up_lab_network  # late: pyroute2 is needed in this short process only

    folder, nodes, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    try:
        enter_new_namespaces()
        set_up_lab_network(nodes)
    except LabError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except Exception as error:  # noqa: BLE001  pyroute2 has no common base for its errors
        sys.stderr.write(f"the lab's network cannot be made ({error}): the kernel needs the modules veth and bridge.\n")
        return 1
    go, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        if os.read(go, 1) != b"g":
            os._exit(1)
        try:
            mount_proc_and_run()
            os.execv(command[0], command)
        except (LabError, OSError) as error:
            sys.stderr.write(f"{error}\n")
        os._exit(1)
    process = folder / "process.json"
    pending = folder / "process.json.new"
    # The child's /proc entry is read through the machine's /proc, which this process still sees.
    pending.write_text(json.dumps({"pid": child, "start_time": read_process_start_time(child)}))
    pending.rename(process)
    os.write(release, b"g")
    return 0


if __name__ == "__main__":
    sys.exit(main())
