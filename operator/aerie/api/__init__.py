"""The resource as Pydantic models, and the one place that its CustomResourceDefinition and its documentation come from.

`make crds` writes both. `SpeculativeDeployment.from_dict` reads what the API server returns; with
unknown="refuse" it reads what a person wrote. What only the schema and its CEL rules say (`Rule`) is not checked when
reading, but by the API server at apply, and by `admission.refusals` before that.
"""

from aerie.api.resource import API_VERSION, GROUP, KIND, PLURAL, VERSION, SpeculativeDeployment
from aerie.api.types.base import ResourceError

__all__ = ["API_VERSION", "GROUP", "KIND", "PLURAL", "VERSION", "ResourceError", "SpeculativeDeployment"]
