"""The resource as Pydantic models: the only source of its CustomResourceDefinition and its reference documentation.

`make crds` writes both. `SpeculativeDeployment.from_dict` reads what the API server returns; with unknown_fields="forbid" it
reads what a user wrote. Reading does not check the schema's CEL rules (`ValidationRule`). The API server checks them at apply,
and `validation.admission.find_manifest_errors` before that.
"""

from aerie.api.resource import API_VERSION, GROUP, KIND, PLURAL, VERSION, SpeculativeDeployment
from aerie.api.types.base import ResourceError

__all__ = ["API_VERSION", "GROUP", "KIND", "PLURAL", "VERSION", "ResourceError", "SpeculativeDeployment"]
