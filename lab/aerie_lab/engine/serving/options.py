"""Parameters of the simulation, as JSON or the path of a JSON file in the variable AERIE_SIMULATOR: the command line is vLLM's.

    {"step_time": {"grid": "llama3.1-8b-h100-tp1", "seconds_per_prompt_token": 2e-5, "seconds_per_cached_token": 2e-8,
                   "log_sd": 0.03},
     "acceptance": {"chat": {"rates": [0.73, 0.52, 0.36], "spread": 0.4}},
     "startup_seconds": 20}

`step_time` names a published grid or a formula (by name, or with the fields of step.StepTimeFormula). Every field has a default.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from aerie_lab.engine.metrics.metrics_corruption import MetricsCorruption, parse_corruption
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE, NO_DRIFT, Acceptance, Drift, conditionals_from_rates
from aerie_lab.engine.performance_model.step import STEP_TIME_FORMULAS, ScaledStepTime, StepTime, StepTimeFormula, load_grid
from aerie_lab.engine.serving.arguments import NEWEST_VLLM_VERSION
from aerie_lab.engine.serving.drafter_faults import DrafterFault, parse_drafter_fault
from aerie_lab.errors import StateError

OPTIONS_VARIABLE = "AERIE_SIMULATOR"
IMAGE_TAG_VARIABLE = "AERIE_SIMULATOR_TAG"
"""Variable with the tag of the container's image, set by the lab; a tag that is not a version of vLLM is ignored."""
_VERSION_TAG_PATTERN = re.compile(r"v?(\d+\.\d+\.\d+(?:\.\d+)?(?:rc\d+)?)(?:[-+._].*)?")
KEEP_ALIVE_VARIABLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
"""vLLM's own variable, which the simulator honours too."""


@dataclass(frozen=True)
class SimulatorOptions:
    """The simulation's own parameters."""

    step_time: StepTime = STEP_TIME_FORMULAS["dense-8b"]
    acceptance: Mapping[str, Acceptance] = field(default_factory=lambda: CLASS_ACCEPTANCE)
    """Per class of traffic, which a request names in its header `x-traffic-class`."""
    default_class: str = "chat"
    apply_drafter_effect: bool = True
    """Whether the drafter's form moves the acceptance; false when `acceptance` was measured with this very drafter."""
    drift: Drift = NO_DRIFT
    startup_seconds: float = 2.0
    """Seconds until the port opens. Real vLLM takes 20 s and more on CPU, minutes on GPUs."""
    kv_tokens: int = 320_000
    """Tokens that the KV cache holds."""
    bytes_per_token: float = 4.0
    """Bytes of UTF-8 per token of a prompt that comes as text."""
    answer_tokens: float | None = None
    """Mean number of tokens (geometric) after which the model ends an answer; None: it never does before max_tokens."""
    seed: int = 0
    version: str = NEWEST_VLLM_VERSION
    """Version of vLLM that /version reports, and whose flags are accepted. Default: that of the image's tag
    (`IMAGE_TAG_VARIABLE`)."""
    own_requests_per_second: float = 0.0
    """Mean requests per second that the engine sends itself, so that a fleet without clients has metrics."""
    metrics_corruption: MetricsCorruption | None = None
    """How its metrics are corrupted; None: not (`metrics_corruption`)."""
    swap_seconds: float = 0.03
    """Seconds in which a worker loads another drafter in place, while no request advances; on a GPU 0.015 to 0.055."""
    drafter_fault: DrafterFault | None = None
    """How changes of the drafter in place fail; None: not (`drafter_faults`)."""
    keep_alive_seconds: float = 5.0
    """Seconds after which an idle connection is closed: 5 as in vLLM, whose variable takes precedence."""


def read_options(environment: Mapping[str, str] = os.environ) -> SimulatorOptions:
    """Return the options of the three variables. Raises StateError."""
    text = environment.get(OPTIONS_VARIABLE, "").strip()
    if text and not text.startswith("{"):
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise StateError(f"{OPTIONS_VARIABLE} names the file {text}, which cannot be read: {error.strerror}.") from error
    try:
        document = json.loads(text or "{}")
    except ValueError as error:
        raise StateError(f"{OPTIONS_VARIABLE} is not JSON: {error}.") from error
    options = parse_options(document)
    if "version" not in document and (tag := _VERSION_TAG_PATTERN.fullmatch(environment.get(IMAGE_TAG_VARIABLE, ""))):
        options = replace(options, version=tag[1])
    if seconds := environment.get(KEEP_ALIVE_VARIABLE):
        try:
            return replace(options, keep_alive_seconds=float(int(seconds)))
        except ValueError as error:
            raise StateError(f"{KEEP_ALIVE_VARIABLE} is '{seconds}': it must be a whole number of seconds.") from error
    return options


def parse_options(document: Mapping[str, Any]) -> SimulatorOptions:
    """Return the options of a JSON object. Raises StateError."""
    names = {each.name for each in fields(SimulatorOptions)} | {"speed"}
    values = dict(document)
    for unknown in sorted(values.keys() - names):
        raise StateError(f"{OPTIONS_VARIABLE}: unknown field '{unknown}': one of {', '.join(sorted(names))}.")
    try:
        speed = float(values.pop("speed", 1.0))
        if "step_time" in values:
            values["step_time"] = _parse_step_time(values["step_time"])
        if speed != 1.0:
            values["step_time"] = ScaledStepTime(values.get("step_time", SimulatorOptions.step_time), 1 / speed)
        if "acceptance" in values:
            values["acceptance"] = {name: _parse_acceptance(each) for name, each in values["acceptance"].items()}
        if "drift" in values:
            values["drift"] = Drift(**values["drift"])
        if values.get("metrics_corruption") is not None:
            values["metrics_corruption"] = parse_corruption(values["metrics_corruption"])
        if values.get("drafter_fault") is not None:
            values["drafter_fault"] = parse_drafter_fault(values["drafter_fault"])
        options = SimulatorOptions(**values)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise StateError(f"{OPTIONS_VARIABLE} cannot be used: {error}.") from error
    if options.default_class not in options.acceptance:
        raise StateError(
            f"{OPTIONS_VARIABLE}: default_class is '{options.default_class}': acceptance names {', '.join(options.acceptance)}."
        )
    return options


def _parse_step_time(value: Mapping[str, Any]) -> StepTime:
    if "grid" in value:
        return load_grid(value["grid"], **{name: float(each) for name, each in value.items() if name != "grid"})
    formula = value["formula"]
    if isinstance(formula, str):
        if formula not in STEP_TIME_FORMULAS:
            raise StateError(f"{OPTIONS_VARIABLE}: formula '{formula}' is unknown: one of {', '.join(STEP_TIME_FORMULAS)}.")
        return STEP_TIME_FORMULAS[formula]
    return StepTimeFormula(**{**formula, "captured_sizes": tuple(formula.get("captured_sizes", ()))})


def _parse_acceptance(value: Mapping[str, Any]) -> Acceptance:
    conditionals = conditionals_from_rates(value["rates"]) if "rates" in value else tuple(value["conditionals"])
    return Acceptance(conditionals, float(value.get("spread", 0.0)))
