"""Wheels that a test writes, and locks that pin them: pip finds them in a folder and nowhere else."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wheels:
    """A folder of wheels."""

    folder: Path

    def write(self, name: str, version: str, files: Mapping[str, str], programs: Mapping[str, str]) -> str:
        """Write a package of the files, with programs as `name: module:function`. Return the lines of a lock that pin it."""
        about = f"{name.replace('-', '_')}-{version}.dist-info"
        content = dict(files)
        content[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        content[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        scripts = "\n".join(f"{program} = {call}" for program, call in programs.items())
        content[f"{about}/entry_points.txt"] = f"[console_scripts]\n{scripts}\n"
        record = [f"{about}/RECORD,,"]
        for path, text in content.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(text.encode())}")
        content[f"{about}/RECORD"] = "\n".join(record) + "\n"
        self.folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(self._path(name, version), "w") as wheel:
            for path, text in content.items():
                wheel.writestr(path, text)
        digest = hashlib.sha256(self._path(name, version).read_bytes()).hexdigest()
        return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"

    def unpack(self, name: str, version: str, folder: Path) -> None:
        """Put the package's files into a folder of packages, as pip does, without its programs."""
        with zipfile.ZipFile(self._path(name, version)) as wheel:
            wheel.extractall(folder)

    def lock(self, name: str, pins: str) -> Path:
        """Write a lock file beside the folder."""
        lock = self.folder.parent / f"{name}.txt"
        lock.write_text(pins)
        return lock

    def _path(self, name: str, version: str) -> Path:
        return self.folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
