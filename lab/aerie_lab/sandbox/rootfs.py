"""The file system that a container sees: the machine's own, copy-on-write, with the pod's volumes mounted into it.

A container image of the lab is a command on this machine, so a container needs the machine's files (its interpreter, its
libraries), and must not change them. Each top-level folder is covered by an overlay whose upper layer is a tmpfs of the
container, so that writes and mount points never reach the machine:

    /            tmpfs
    /usr, /etc.. overlay(lower = the machine's folder, upper = tmpfs)     folders without mounts below
    /mnt ..      a folder of the above, where something is mounted below  (an overlay cannot cover a mount)
    /proc        the container's processes;  /dev, /run: small and fresh;  /sys and /proc/sys: the machine's, read-only
    mountPath    bind mounts of the pod's volumes, read-only where requested

Guarantees: nothing is written to the machine outside volumes; all mounts vanish with the container's last process.
Not guaranteed: secrecy. A container reads what the lab's user can read; the lab is for trying, not for untrusted code.
Without root, a mount point below a folder that belongs to another user cannot be made; that is reported by name.
"""

from __future__ import annotations

import os
import stat

from . import linux

TYPE_CHECKING = False
if TYPE_CHECKING:  # every container pays for what is imported here
    from collections.abc import Iterable

_STAGING_FOLDER = "/run/aerie-lab/stage"
_REPLACED_TOP_LEVEL_FOLDERS = frozenset({"proc", "dev", "run", "sys", "lost+found"})
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_READ_ONLY_PROC_ENTRIES = ("sys", "sysrq-trigger", "irq", "bus")  # below /proc: the machine's, not the container's
_MAX_WRITABLE_MIB = 2048  # what a container may write to its own file system; tmpfs, so it is memory
_MAX_COPIED_FILE_BYTES = 1 << 20


def enter_container_root(mounts: Iterable[tuple[str, str, bool]], read_only: bool, shared_memory: str) -> None:
    """Give this process (alone in new mount and PID namespaces) the container's root.

    mounts: (source, mount path, read-only) of every volume, outer paths first; source is a file or a folder.
    shared_memory: the folder or tmpfs to show as /dev/shm. Raises OSError naming the path that failed.
    """
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    os.makedirs(_STAGING_FOLDER, exist_ok=True)
    linux.mount("tmpfs", _STAGING_FOLDER, "tmpfs", options=f"mode=755,size={_MAX_WRITABLE_MIB}m")
    root = f"{_STAGING_FOLDER}/root"
    os.mkdir(root)
    linux.bind_mount(root, root)
    mounted = _mount_points()
    for entry in os.scandir("/"):
        if entry.name not in _REPLACED_TOP_LEVEL_FOLDERS:
            _mount_copy_on_write(entry.path, root, mounted)
    _mount_run(root)
    mounts = list(mounts)
    if read_only:
        for source, path, _ in mounts:
            if not path.startswith("/dev/"):
                _make_mount_point(source, path, root)
        linux.make_read_only(root)
    _mount_kernel_folders(root, shared_memory)
    for source, path, source_read_only in mounts:
        target = _make_mount_point(source, path, root)
        linux.bind_mount(source, target)
        if source_read_only:
            linux.make_read_only(target)
    linux.pivot_root(root)


def _mount_points() -> list[str]:
    with open("/proc/self/mountinfo") as table:
        return [line.split(" ", 5)[4].replace("\\040", " ") for line in table]


def _mount_copy_on_write(path: str, root: str, mounted: list[str]) -> None:
    """Show the machine's `path` below `root`, copy-on-write."""
    target = root + path
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif not os.path.isdir(path):
        _mount_file(path, target)
    elif any(point.startswith(path + "/") for point in mounted):
        os.mkdir(target)
        os.chmod(target, os.stat(path).st_mode & 0o7777 | 0o700)
        try:
            children = [entry.path for entry in os.scandir(path)]
        except PermissionError:
            return
        for child in children:
            _mount_copy_on_write(child, root, mounted)
    else:
        _mount_overlay(path, target)


def _mount_file(path: str, target: str) -> None:
    """One file of a folder that no overlay covers: a copy when it is small, else the machine's own, read-only."""
    metadata = os.lstat(path)
    if stat.S_ISREG(metadata.st_mode) and metadata.st_size <= _MAX_COPIED_FILE_BYTES and os.access(path, os.R_OK):
        with open(path, "rb") as source, open(target, "wb") as copy:
            copy.write(source.read())
        os.chmod(target, metadata.st_mode & 0o7777)
        return
    with open(target, "w"):
        pass
    linux.bind_mount(path, target)
    linux.make_read_only(target)


def _mount_overlay(path: str, target: str) -> None:
    layer = f"{_STAGING_FOLDER}/{path.strip('/').replace('/', '%')}"
    upper, work = f"{layer}.upper", f"{layer}.work"
    os.mkdir(upper)
    os.chmod(upper, os.stat(path).st_mode & 0o7777 | 0o700)
    os.mkdir(work)
    os.mkdir(target)
    quoted = path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
    linux.mount("overlay", target, "overlay", options=f"lowerdir={quoted},upperdir={upper},workdir={work},userxattr")


def _mount_run(root: str) -> None:
    for name in ("proc", "dev", "run", "sys"):
        os.mkdir(f"{root}/{name}")
    linux.mount("tmpfs", f"{root}/run", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=64m")


def _mount_kernel_folders(root: str, shared_memory: str) -> None:
    linux.mount("proc", f"{root}/proc", "proc")
    for name in _READ_ONLY_PROC_ENTRIES:
        if os.path.exists(f"{root}/proc/{name}"):
            linux.bind_mount(f"{root}/proc/{name}", f"{root}/proc/{name}")
            linux.make_read_only(f"{root}/proc/{name}")
    linux.bind_mount("/sys", f"{root}/sys")
    linux.make_read_only(f"{root}/sys")
    linux.mount("tmpfs", f"{root}/dev", "tmpfs", linux.MS_NOSUID, "mode=755,size=1m")
    for name in _DEVICES:
        with open(f"{root}/dev/{name}", "w"):
            pass
        linux.bind_mount(f"/dev/{name}", f"{root}/dev/{name}")
    for name, to in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(to, f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm")
    linux.bind_mount(shared_memory, f"{root}/dev/shm")


def _make_mount_point(source: str, path: str, root: str) -> str:
    """Make `path` below `root` fit to mount `source` on; returns where it really is."""
    # A link such as /var/run -> /run must be followed inside the new root, not on the machine.
    resolved = _resolve_below(root, path)
    if os.path.lexists(resolved):
        return resolved
    try:
        if os.path.isdir(source):
            os.makedirs(resolved, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(resolved), exist_ok=True)
            with open(resolved, "w"):
                pass
    except OSError as error:
        raise OSError(error.errno, f"cannot make the mount point ({error.strerror})", path) from error
    return resolved


def _resolve_below(root: str, relative: str) -> str:
    """Return the real path of `relative` as it will be once `root` is the root; links are followed at most 40 times."""
    pending = relative.split("/")
    done: list[str] = []
    hops = 0
    while pending:
        part = pending.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            del done[-1:]
            continue
        here = "/".join([root, *done, part])
        if os.path.islink(here) and hops < 40:
            hops += 1
            link = os.readlink(here)
            if link.startswith("/"):
                done = []
            pending = link.split("/") + pending
        else:
            done.append(part)
    return "/".join([root, *done])
