"""Brings in another project's EAGLE 3 or 3.1 checkpoint, as what vLLM serves.

    read      config.json and weights, whichever of the three ways they were saved in
    names     that project's tensor names, in vLLM's
    settings  that project's configuration, with its own defaults and its own way to count layers, in vLLM's

Guarantees: no weight is changed; whatever was assumed is said as a finding; what cannot be known from the files and matters
(which layers, which feedback) is asked for, not guessed. Not guaranteed: that the checkpoint is any good; measure it.
"""

from aerie.engine.models.origin import CheckpointOrigin
from aerie_drafter.convert.bring_in import Conversion, convert_checkpoint, import_checkpoint
from aerie_drafter.convert.settings import ConversionOverrides, LayerIdConvention

__all__ = [
    "CheckpointOrigin",
    "Conversion",
    "ConversionOverrides",
    "LayerIdConvention",
    "convert_checkpoint",
    "import_checkpoint",
]
