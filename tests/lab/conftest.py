"""The image volumes that the lab of the session knows: one for the tests of the node agent, and models for the operator's."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from aerie_drafter import checkpoint
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.model import Drafter
from aerie_lab.testing.model import Shape, write_tiny_llama

TARGET = Shape(layers=4)


@pytest.fixture(scope="session")
def lab_images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the path of the tests' image table. Its repositories are models.example/... and aerie.dev/test/....

    target, eagle3, eagle31, torn: a tiny target, drafters for it, and a drafter with truncated weights.

    better, worse: drafters of which the simulated engine accepts many more, or many fewer tokens. lossy: a drafter that changes
    answers. short: a drafter with YaRN and fewer positions than the target, which reduces the engine's context.

    passes: exits with status 0, whatever its arguments; for preflights in tests of something else.
    mute: the simulated engine without its metrics.
    crashes, hangs: engines that exit immediately, or never answer.
    """
    folder = tmp_path_factory.mktemp("images")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"from": "image volume"}')
    write_tiny_llama(folder / "target", TARGET)
    for name, is_31 in (("eagle3", False), ("eagle31", True), ("torn", True)):
        checkpoint.save_checkpoint(folder / name, drafter(is_31), {})
    weights = folder / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for name, simulated in (
        ("better", {"logit_shift": 0.8}),
        ("worse", {"logit_shift": -0.8}),
        ("lossy", {"altered_share": 0.2}),
    ):
        shutil.copytree(folder / "eagle31", folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, "simulator": simulated}))
    shutil.copytree(folder / "eagle31", folder / "short")
    config = json.loads((folder / "short" / "config.json").read_text())
    positions = json.loads((folder / "target" / "config.json").read_text())["max_position_embeddings"] // 2
    yarn = {"max_position_embeddings": positions, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    (folder / "short" / "config.json").write_text(json.dumps(config | yarn))
    names = ("target", "eagle3", "eagle31", "torn", "better", "worse", "lossy", "short")
    rows = {"aerie.dev/test/model": "model"} | {f"models.example/{name}": name for name in names}
    table = folder / "images.toml"
    images = '[[image]]\nrepository = "aerie.dev/test/passes"\nentrypoint = ["/bin/true"]\n'
    images += '[[image]]\nrepository = "aerie.dev/test/crashes"\nentrypoint = ["/bin/false"]\n'
    images += '[[image]]\nrepository = "aerie.dev/test/hangs"\nentrypoint = ["/bin/sh", "-c", "exec sleep infinity", "engine"]\n'
    mute = 'exec {python} -m aerie_lab.engine "$@" --disable-log-stats'
    images += f"""[[image]]\nrepository = "aerie.dev/test/mute"\nentrypoint = ["/bin/sh", "-c", '{mute}', "engine"]\n"""
    table.write_text(images + "".join(f'[[volume]]\nrepository = "{name}"\nfolder = "{below}"\n' for name, below in rows.items()))
    return [str(table)]


def drafter(is_31: bool) -> Drafter:
    """A drafter for the tiny target, with random weights."""
    torch.manual_seed(0)
    config = DrafterConfig(
        family=DrafterFamily.LLAMA,
        hidden_size=TARGET.hidden,
        intermediate_size=TARGET.intermediate,
        num_attention_heads=TARGET.heads,
        num_key_value_heads=TARGET.heads,
        head_dim=TARGET.hidden // TARGET.heads,
        vocab_size=258,
        draft_vocab_size=258,
        target_hidden_size=TARGET.hidden,
        aux_layer_ids=(1, 2, 3),
        fc_norm=is_31,
        norm_output=is_31,
    )
    return Drafter(config)
