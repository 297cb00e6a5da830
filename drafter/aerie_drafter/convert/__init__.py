"""Import of another project's EAGLE 3 or 3.1 checkpoint into the format that vLLM serves.

    read      config.json and weights, in each of three file formats
    names     tensor names of other projects, as vLLM's
    settings  configurations of other projects, with their defaults and layer numbering, as vLLM's

Guarantees: no weight is changed; every assumption is reported as a finding; what the files do not contain and matters (layers,
feedback) is required from the user, not guessed. Not guaranteed: the quality of the checkpoint; evaluate it.
"""

from aerie.engine.models.origin import CheckpointOrigin
from aerie_drafter.convert.conversion import Conversion, convert_checkpoint, import_checkpoint
from aerie_drafter.convert.settings import ConversionOverrides, LayerIdConvention

__all__ = [
    "CheckpointOrigin",
    "Conversion",
    "ConversionOverrides",
    "LayerIdConvention",
    "convert_checkpoint",
    "import_checkpoint",
]
