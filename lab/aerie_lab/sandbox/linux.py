"""The handful of Linux system calls that Python 3.11's standard library lacks, as typed functions.

Guarantees: each raises OSError with the call's name and the path on failure; importing this module costs milliseconds,
because the container launcher imports it for every container. Not a general binding: only what the lab uses.
Numbers are from the kernel's uapi headers (sched.h, mount.h, prctl.h); the system call numbers used are those that
x86-64 and AArch64 share (mount_setattr) or are looked up by machine (pivot_root).
"""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_ATTR_RDONLY = 0x1
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.syscall.restype = ctypes.c_long


def _raise_on_failure(result: int, call: str, path: str | None = None) -> None:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{call}: {os.strerror(errno)}", path)


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags` (CLONE_NEW*) for new ones; a new PID namespace takes effect for children."""
    _raise_on_failure(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace behind `fd`, which must be of `kind` (one CLONE_NEW*)."""
    _raise_on_failure(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """mount(2)."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        flags,
        options.encode() if options else None,
    )
    _raise_on_failure(result, f"mount {kind or 'bind'} {source}", target)


def bind_mount(source: str, target: str) -> None:
    """Show `source`, with all that is mounted below it, at `target` too."""
    mount(source, target, flags=MS_BIND | MS_REC)


def make_read_only(target: str) -> None:
    """Make the mount at `target` and all below it read-only; unlike a remount it keeps locked flags, so it works without root."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _raise_on_failure(result, "mount_setattr", target)


def unmount(target: str) -> None:
    """Detach what is mounted at `target`."""
    _raise_on_failure(_libc.umount2(ctypes.c_char_p(os.fsencode(target)), ctypes.c_int(MNT_DETACH)), "umount", target)


def pivot_root(new_root: str) -> None:
    """Make the mount at `new_root` the root of this mount namespace and drop the old root."""
    machine = os.uname().machine
    if machine not in _SYS_PIVOT_ROOT:
        raise OSError(0, f"pivot_root: no system call number known for {machine}")
    os.chdir(new_root)
    # new_root == put_old stacks the old root on top of the new one, where it is detached immediately: pivot_root(2), NOTES.
    here = ctypes.c_char_p(b".")
    _raise_on_failure(_libc.syscall(ctypes.c_long(_SYS_PIVOT_ROOT[machine]), here, here), "pivot_root", new_root)
    unmount(".")
    os.chdir("/")


def set_hostname(name: str) -> None:
    """sethostname(2): at most 64 bytes are kept."""
    raw = name.encode()[:64]
    _raise_on_failure(_libc.sethostname(ctypes.c_char_p(raw), ctypes.c_size_t(len(raw))), "sethostname")


def die_with_parent() -> None:
    """Get SIGKILL when the thread that is now the parent ends; it takes no notice of a parent that has ended before."""
    _raise_on_failure(_libc.prctl(ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, so that their exit status can be waited for."""
    _raise_on_failure(_libc.prctl(ctypes.c_int(_PR_SET_CHILD_SUBREAPER), ctypes.c_ulong(1), 0, 0, 0), "prctl")
