"""A pod's volumes as folders and files on this machine, ready to be mounted into its containers.

    POD FOLDER/volumes/NAME/            emptyDir, and everything that is written from API objects
    /run/aerie-lab/memory/UID/NAME      emptyDir with medium Memory: a tmpfs of the lab, with its sizeLimit
    elsewhere                           hostPath, claims (a hostPath or local persistent volume), image volumes

Files from config maps, secrets, the downward API and tokens are replaced together, by the rename of one link, as a kubelet
does; `refresh` brings them up to date. Guarantees: what cannot be mounted is a VolumeError with the volume's name; all but
hostPath, claims and images is deleted by `remove`. Not guaranteed: sizeLimit of an emptyDir on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aerie_lab.errors import KubeError, LabError
from aerie_lab.images.table import ImageTable
from aerie_lab.kube.client import KubeClient, KubeObject, core_path
from aerie_lab.node.environment import (
    ConfigError,
    decode_object_data,
    expand_variables,
    parse_quantity,
    resolve_field_reference,
    resolve_resource_reference,
)
from aerie_lab.sandbox import linux

_log = logging.getLogger(__name__)
MEMORY_VOLUMES_FOLDER = Path("/run/aerie-lab/memory")
VolumeFiles = dict[str, tuple[bytes, int]]
"""Relative path -> (content, file mode)."""


class VolumeError(Exception):
    """A volume that cannot be mounted (yet): a kubelet's FailedMount."""


@dataclass
class PodVolumes:
    """The volumes of one pod. The downward API returns `addresses` and `node_allocatable`."""

    uid: str
    folder: Path
    client: KubeClient
    images: ImageTable
    addresses: Mapping[str, str]
    node_allocatable: Mapping[str, str]
    sources: dict[str, tuple[Path, bool]] = field(default_factory=dict)
    """Volume name -> (file or folder on this machine, must be read-only)."""
    _tokens: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    async def prepare(self, pod: KubeObject) -> None:
        """Make all volumes ready. Raises VolumeError for the first that is not."""
        for volume in pod["spec"].get("volumes") or []:
            try:
                self.sources[volume["name"]] = await self._prepare_volume(pod, volume)
            except (ConfigError, LabError, OSError) as error:
                text = str(error)
                raise VolumeError(f'MountVolume.SetUp failed for volume "{volume["name"]}": {text}') from error

    async def refresh(self, pod: KubeObject) -> None:
        """Rewrite what has changed in the API objects behind the volumes, and tokens past four fifths of their life."""
        for volume in pod["spec"].get("volumes") or []:
            if volume.keys() & {"configMap", "secret", "projected", "downwardAPI"}:
                try:
                    await self._prepare_volume(pod, volume)
                except (VolumeError, ConfigError, LabError, OSError) as error:
                    _log.info("volume %s stays as it was: %s", volume["name"], error)

    def mount_shared_memory(self) -> Path:
        """Return the pod's /dev/shm: 64 MiB, as container engines give."""
        return _mount_tmpfs(MEMORY_VOLUMES_FOLDER / self.uid / ".shm", "64m")

    def build_mounts(self, container: KubeObject, variables: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the container's mounts, outer paths first: source, path, read_only. Raises VolumeError."""
        mounts = []
        for mount in container.get("volumeMounts") or []:
            source, read_only = self.sources[mount["name"]]
            below = mount.get("subPath") or expand_variables(mount.get("subPathExpr") or "", variables)
            if below:
                if below.startswith("/") or ".." in Path(below).parts:
                    raise VolumeError(f"volumeMounts[{mount['name']}].subPath '{below}' must stay inside the volume")
                source = source / below
                if not source.exists():
                    if read_only:
                        raise VolumeError(f"volumeMounts[{mount['name']}].subPath '{below}' is not in the volume")
                    source.mkdir(parents=True)
            read_only = read_only or bool(mount.get("readOnly"))
            mounts.append({"source": str(source), "path": mount["mountPath"], "read_only": read_only})
        return sorted(mounts, key=lambda m: len(Path(m["path"]).parts))

    def remove(self) -> None:
        """Take away what the pod alone had."""
        unmount_memory_volumes(self.uid)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _prepare_volume(self, pod: KubeObject, volume: KubeObject) -> tuple[Path, bool]:
        name, namespace = volume["name"], pod["metadata"]["namespace"]
        target = self.folder / name
        if "emptyDir" in volume:
            return self._make_empty_dir(volume, target), False
        if source := volume.get("hostPath"):
            return _resolve_host_path(source), False
        if source := volume.get("image"):
            return self.images.resolve_volume(source["reference"]), True
        if source := volume.get("persistentVolumeClaim"):
            return await self._resolve_claim(namespace, source), bool(source.get("readOnly"))
        files = await self._read_files(pod, volume)
        _write_atomically(target, files)
        return target, True

    def _make_empty_dir(self, volume: KubeObject, target: Path) -> Path:
        empty = volume["emptyDir"] or {}
        if empty.get("medium") == "Memory":
            size = str(int(parse_quantity(empty["sizeLimit"]))) if empty.get("sizeLimit") else "50%"
            return _mount_tmpfs(MEMORY_VOLUMES_FOLDER / self.uid / volume["name"], size)
        if empty.get("medium"):
            raise VolumeError(f"emptyDir.medium '{empty['medium']}' is not offered by the lab: '' or 'Memory'")
        target.mkdir(parents=True, exist_ok=True)
        target.chmod(0o777)
        return target

    async def _resolve_claim(self, namespace: str, source: KubeObject) -> Path:
        claim = await self.client.get(core_path("persistentvolumeclaims", namespace, source["claimName"]))
        if (claim.get("status") or {}).get("phase") != "Bound":
            raise VolumeError(f"persistentvolumeclaim '{source['claimName']}' is not bound")
        volume = await self.client.get(core_path("persistentvolumes", None, claim["spec"]["volumeName"]))
        for kind in ("hostPath", "local"):
            if kind in volume["spec"]:
                return _resolve_host_path({"type": "Directory"} | volume["spec"][kind])
        raise VolumeError(f"persistent volume {volume['metadata']['name']}: the lab mounts hostPath and local volumes only")

    async def _read_files(self, pod: KubeObject, volume: KubeObject) -> VolumeFiles:
        if projected := volume.get("projected"):
            mode = projected.get("defaultMode", 0o644)
            files: VolumeFiles = {}
            for source in projected.get("sources") or []:
                files |= await self._read_source(pod, source, mode, f"{volume['name']}/")
            return files
        kind = next(k for k in ("configMap", "secret", "downwardAPI") if k in volume)
        source = dict(volume[kind] or {})
        if kind == "secret":
            source["name"] = source.pop("secretName", None)
        return await self._read_source(pod, {kind: source}, source.get("defaultMode", 0o644), "")

    async def _read_source(self, pod: KubeObject, source: KubeObject, mode: int, prefix: str) -> VolumeFiles:
        ((kind, details),) = source.items()
        if kind in ("configMap", "secret"):
            return await self._read_object_keys(pod, "configmaps" if kind == "configMap" else "secrets", details, mode)
        if kind == "downwardAPI":
            return {
                item["path"]: (self._resolve_downward_item(pod, item).encode(), item.get("mode") or mode)
                for item in details.get("items") or []
            }
        if kind == "serviceAccountToken":
            return {details["path"]: (await self._request_token(pod, details, prefix + details["path"]), mode & 0o777)}
        raise VolumeError(f"projected source '{kind}' is not offered by the lab")

    async def _read_object_keys(self, pod: KubeObject, plural: str, details: KubeObject, mode: int) -> VolumeFiles:
        try:
            item = await self.client.get(core_path(plural, pod["metadata"]["namespace"], details["name"]))
        except KubeError as error:
            if error.status == 404 and details.get("optional"):
                return {}
            raise
        values = decode_object_data(plural, item)
        if not details.get("items"):
            return {key: (value, mode) for key, value in values.items()}
        files: VolumeFiles = {}
        for entry in details["items"]:
            if entry["key"] in values:
                files[entry["path"]] = (values[entry["key"]], entry.get("mode") or mode)
            elif not details.get("optional"):
                raise VolumeError(f"{plural.removesuffix('s')} {details['name']} has no key '{entry['key']}'")
        return files

    def _resolve_downward_item(self, pod: KubeObject, item: KubeObject) -> str:
        if "fieldRef" in item:
            return resolve_field_reference(pod, item["fieldRef"]["fieldPath"], self.addresses)
        reference = item["resourceFieldRef"]
        return resolve_resource_reference(pod, {"name": reference.get("containerName", "")}, reference, self.node_allocatable)

    async def _request_token(self, pod: KubeObject, details: KubeObject, where: str) -> bytes:
        cached = self._tokens.get(where)
        if cached and time.monotonic() < cached[1]:
            return cached[0]
        metadata = pod["metadata"]
        seconds = int(details.get("expirationSeconds") or 3600)
        account = pod["spec"].get("serviceAccountName") or "default"
        answer = await self.client.create(
            core_path("serviceaccounts", metadata["namespace"], account, "token"),
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {
                    "audiences": [details["audience"]] if details.get("audience") else [],
                    "expirationSeconds": seconds,
                    "boundObjectRef": {
                        "apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"],
                    },
                },
            },
        )  # fmt: skip
        token = str(answer["status"]["token"]).encode()
        self._tokens[where] = (token, time.monotonic() + 0.8 * seconds)
        return token


def unmount_memory_volumes(uid: str) -> None:
    """Take away the tmpfs mounts of a pod."""
    with contextlib.suppress(FileNotFoundError):
        for mounted in list((MEMORY_VOLUMES_FOLDER / uid).iterdir()):
            with contextlib.suppress(OSError):
                linux.unmount(str(mounted))
            mounted.rmdir()
        (MEMORY_VOLUMES_FOLDER / uid).rmdir()


def _mount_tmpfs(target: Path, size: str) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    if not target.is_mount():
        linux.mount("tmpfs", str(target), "tmpfs", options=f"mode=1777,size={size}")
    return target


def _resolve_host_path(source: Mapping[str, Any]) -> Path:
    path, kind = Path(source["path"]), source.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    elif kind not in ("", "Directory", "File", "Socket"):
        raise VolumeError(f"hostPath type '{kind}' is not offered by the lab")
    checks = {"Directory": Path.is_dir, "File": Path.is_file, "Socket": Path.is_socket}
    if not checks.get(kind, Path.exists)(path):
        raise VolumeError(f"hostPath {path} does not exist{f' as a {kind}' if kind else ''}")
    return path


def _write_atomically(target: Path, files: VolumeFiles) -> None:
    """Make the folder `target` show exactly `files`, switching from the old content to the new in one step."""
    target.mkdir(parents=True, exist_ok=True)
    current = target / "..data"
    if current.is_symlink() and _read_folder(current.resolve()) == files:
        return
    fresh = target / f"..{time.time_ns()}"
    fresh.mkdir()
    for path, (content, mode) in files.items():
        file = fresh / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
    old = current.resolve() if current.is_symlink() else None
    pending = target / "..data_tmp"
    pending.symlink_to(fresh.name)
    os.replace(pending, current)
    top_level_names = {Path(path).parts[0] for path in files}
    for name in top_level_names:
        if not (target / name).is_symlink():
            (target / name).symlink_to(f"..data/{name}")
    for entry in target.iterdir():
        if entry.is_symlink() and not entry.name.startswith("..") and entry.name not in top_level_names:
            entry.unlink()
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _read_folder(folder: Path) -> VolumeFiles:
    return {
        str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mode & 0o777)
        for file in folder.rglob("*")
        if file.is_file()
    }
