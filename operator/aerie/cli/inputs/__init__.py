"""Inputs of the commands: manifests, workloads, checkpoints, recorded metrics."""
