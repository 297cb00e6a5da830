"""The engine's side of changes of the drafter in place: a plugin of vLLM, without dependencies beyond vLLM's own."""
