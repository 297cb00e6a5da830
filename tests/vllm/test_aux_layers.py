"""The table of published configs against vLLM's own functions: the auxiliary layers that both model runners read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.unit.engine.preflight.published import ROWS

pytestmark = pytest.mark.timeout(2400)  # most of it is for a first installation of vLLM

ORACLE = """
import json, sys
from types import SimpleNamespace as Object
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.transformers_utils.configs.speculators.algos import update_eagle3
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config as runner_2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
def native(config):
    if "speculators_model_type" not in config:
        return config
    layer = dict(config["transformer_layer_config"])
    update_eagle3(config_dict=config, pre_trained_config=layer)
    return layer
def read_layers(row):
    spec = Object(method="eagle3", draft_model_config=Object(hf_config=Object(**native(row["config"]))))
    target = Object(model=Object(layers=range(row["layers"])))
    default = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(target)
    first = GPUModelRunner._get_eagle3_aux_layers_from_config(Object(speculative_config=spec))
    return [first or default, runner_2(spec) or default]
print("answer", json.dumps([read_layers(row) for row in json.loads(sys.stdin.read())]))
"""


def test_vllm_reads_the_layers_of_the_table(vllm: Path) -> None:
    python = vllm / "python"
    if not python.exists():
        pytest.skip("AERIE_LAB_BINARIES names a vllm of another kind, without its Python")
    rows = [{"config": dict(row.config), "layers": row.target_layers} for row in ROWS]
    process = subprocess.run(
        [str(python), "-B", "-c", ORACLE], input=json.dumps(rows), capture_output=True, text=True, check=False
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("answer ")]
    assert lines, process.stderr[-2000:]
    layers_by_row = json.loads(lines[0].removeprefix("answer "))
    assert [[tuple(layers) for layers in runners] for runners in layers_by_row] == [[row.v1, row.v2] for row in ROWS]
