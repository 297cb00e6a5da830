"""Identity of a target: what must not change between the parts of an interrupted run.

Guarantee: another configuration or other weights in a folder, or another commit of a repository, have another identity. Not
guaranteed for a server: it has a name and no digest, so other weights under the same name are not noticed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from aerie_drafter.checkpoint import compute_model_digest
from aerie_drafter.errors import CheckpointError, TargetError


def identify_target(model: str, revision: str | None) -> str:
    """Return `sha256:...` of a folder, or `NAME@COMMIT` of a repository. Raises TargetError."""
    folder = Path(model)
    if folder.is_dir():
        try:
            return compute_model_digest(folder)
        except CheckpointError:
            return _compute_files_digest(folder)  # weights of another type than safetensors
    try:
        config: Any = AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        raise TargetError(f"target.model {model}: cannot be read: {str(error).strip().splitlines()[0]}") from error
    return f"{model}@{getattr(config, '_commit_hash', None) or revision or 'main'}"


def identify_tokenizer(tokenizer: Any) -> str:
    """Return `sha256:...` of a tokenizer without its chat template."""
    return f"sha256:{hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()}"


def _compute_files_digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        try:
            with file.open("rb") as stream:
                total.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
        except OSError as error:
            raise TargetError(f"{file}: cannot be read ({error.strerror}).") from error
    return f"sha256:{total.hexdigest()}"
