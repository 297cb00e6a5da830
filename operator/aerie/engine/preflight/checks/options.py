"""Whether the engine knows, and obeys, what its speculative config says besides drafter and number of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from aerie.api.engine_options import BY_NAME
from aerie.engine.preflight.input import Subject
from aerie.engine.preflight.registry import check
from aerie.engine.preflight.report import Outcome, Severity, note, passed, refuse, skip, warn
from aerie.engine.speculative_config import faults, faults_of_runner

_OWN = frozenset({"method", "model", "revision", "num_speculative_tokens", "draft_tensor_parallel_size", "tensor_parallel_size"})
"""Keys that other checks are about, or that every config has."""


@check(
    "C34",
    "draft sampling and further keys",
    why="vLLM ends the start at a key that it does not have, and ignores some that its model runner does not obey",
    worst=Severity.REFUSE,
    source="vLLM config/speculative.py and config/vllm.py, 0.22 to 0.33; v1/worker/gpu/spec_decode/speculator.py; "
    "v1/spec_decode/llm_base_proposer.py",
)
def keys(subject: Subject) -> Iterable[Outcome]:
    config = {name: value for name, value in subject.speculative.items() if name not in _OWN and value is not None}
    if not config:
        yield skip("the speculative config has no further keys")
        return
    method = {"method": subject.method} if subject.method is not None else {}
    runner, why = subject.model_runner
    parallel = subject.arguments.tensor_parallel
    seen = [*faults(method | config, subject.version, tensor_parallel=parallel), *faults_of_runner(config, runner, why)]
    for fault in seen:
        yield (refuse if fault.ends_start else warn)(fault.what, fault.way_out)
    for name in sorted(config.keys() - BY_NAME.keys()):
        yield note(f"{name} is in the speculative config, and Aerie does not know it: whether vLLM does could not be checked")
    if not seen and config.keys() <= BY_NAME.keys():
        yield passed(f"vLLM {subject.version} knows {', '.join(sorted(config))}")
