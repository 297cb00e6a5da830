"""One pod of a node: `worker` runs it, `resources` are its address, network and volumes, `environment_inputs` its variables."""
