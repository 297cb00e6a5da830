"""`make bundle`: the whole recipe, from Python's own documentation to folders that `vllm serve` takes.

    1 tokenizer and target     one thread; a number of steps, not a time
    2 the target's answers     one thread
    3 drafters                 `aerie-drafter train` with the YAML files beside this one, two at a time, one thread each
    4 export and evaluation    acceptance length of each on held-out prompts; registry.json

Everything is created in a work folder and then copied, part by part. The same packages on the same type of processor result in
the same bytes (README.md has the digests).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from aerie.terminal import err, out
from aerie_drafter.export import export_checkpoint
from bundle import answers, corpus, registry
from bundle.target import train_target

HERE = Path(__file__).resolve().parent
DRAFTERS = {"eagle3": "EAGLE 3", "eagle31": "EAGLE 3.1", "weak": "weak EAGLE 3.1"}
PARTS = ("target", *DRAFTERS, "prompts.jsonl", "registry.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bundle", usage="make bundle [OUT=folder]", description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="where the parts are put; default: beside the recipe")
    parser.add_argument("--work", type=Path, default=Path("build/bundle"), help="where they are made; emptied first")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    output_folder, work = arguments.out.resolve(), arguments.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)  # paths in what is written are relative to it
    start = time.monotonic()
    items, texts = corpus.items(), corpus.plain()
    loss = train_target(Path("target"), items, texts)
    answers.write_answers(Path(), Path("target"), items)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train_drafter, DRAFTERS))
    trained = {name: Path("training", name, "best") for name in DRAFTERS}
    measured = {name: registry.measure(Path("target"), folder, Path("prompts.jsonl")) for name, folder in trained.items()}
    for name, figures in measured.items():
        export_checkpoint(
            trained[name],
            Path(name),
            target="target",
            acceptance_length=figures["acceptance_length"],
            measured_on="the bundle's prompts.jsonl, greedy",
            include_embedding=False,
        )
    manifest = registry.make(DRAFTERS, measured, corpus.digest(items, texts), loss)
    registry.write(manifest, Path("registry.json"))
    out.print(registry.compare(manifest, HERE / "registry.json"))
    output_folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        put(work / part, output_folder / part)
    err.print(f"{output_folder}: done in {(time.monotonic() - start) / 60:.0f} minutes")


def train_drafter(name: str) -> None:
    """`aerie-drafter train` in a process of its own; its log goes to training-NAME.log."""
    command = [sys.executable, "-m", "aerie_drafter.cli", "train", str(HERE / f"{name}.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    log = Path(f"training-{name}.log")
    with log.open("w") as stream:
        status = subprocess.run(command, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        sys.exit(f"the training of {name} ended with status {status}:\n{log.read_text()[-2000:]}")
    err.print(f"{name}: trained")


def put(source: Path, destination: Path) -> None:
    """Replace `destination` with a copy of `source`."""
    if destination.is_dir():
        shutil.rmtree(destination)
    if source.is_dir():
        shutil.copytree(source, destination)
    else:
        shutil.copyfile(source, destination)
    for file in destination.rglob("*"):
        file.chmod(0o644)  # some libraries write weights for the owner alone


if __name__ == "__main__":
    main()
