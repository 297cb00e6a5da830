"""Write the archive and the manifest of `kubectl aerie` for krew, kubectl's package manager.

    python -m scripts.krew https://HOST/FOLDER build/krew

The archive has a launcher, because krew installs files and no Python packages. The launcher has uv run the release of this
checkout. The address is that of the folder where the release will have the archive. The result is deterministic.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
_LAUNCHER = """#!/bin/sh
if ! command -v uv > /dev/null; then
  echo "error: kubectl aerie by krew needs uv on the PATH: install it, or install aerie-operator by pip." >&2
  exit 2
fi
exec uv tool run --quiet --from aerie-operator=={version} kubectl-aerie "$@"
"""
_PLATFORMS = ("linux", "darwin")


def read_version() -> str:
    """Return the version of the checkout."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def write_krew_files(address: str, folder: Path) -> tuple[Path, Path]:
    """Write the archive and the manifest, and return their paths."""
    version = read_version()
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"kubectl-aerie-{version}.tar.gz"
    archive.write_bytes(_build_archive(version))
    manifest = folder / "aerie.yaml"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    manifest.write_text(yaml.safe_dump(build_manifest(version, f"{address.rstrip('/')}/{archive.name}", digest), sort_keys=False))
    return archive, manifest


def build_manifest(version: str, address: str, digest: str) -> dict[str, object]:
    """Return the manifest. https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/"""
    platforms = [
        {"selector": {"matchLabels": {"os": system}}, "uri": address, "sha256": digest, "bin": "kubectl-aerie"}
        for system in _PLATFORMS
    ]
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "aerie"},
        "spec": {
            "version": f"v{version}",
            "shortDescription": "Look at and decide rollouts of drafters in vLLM fleets",
            "description": "Shows what the operator Aerie does with SpeculativeDeployments: status, history, plans and reports. "
            "Promotes, rolls back, retries and pauses rollouts.\n",
            "caveats": "It needs uv on the PATH, and the operator Aerie in the cluster.\n",
            "platforms": platforms,
        },
    }


def _build_archive(version: str) -> bytes:
    """Return a tar.gz with the launcher and the licence, without times and owners."""
    files = {"kubectl-aerie": (_LAUNCHER.format(version=version).encode(), 0o755)}
    files["LICENSE"] = ((ROOT / "LICENSE").read_bytes(), 0o644)
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def main(arguments: list[str]) -> int:
    """Run the command."""
    if len(arguments) != 2 or urlsplit(arguments[0]).scheme != "https":
        print("usage: python -m scripts.krew https://HOST/FOLDER OUTPUT_FOLDER", file=sys.stderr)
        return 2
    for path in write_krew_files(arguments[0], Path(arguments[1])):
        print(f"krew: wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
