"""What a command reads: manifests, workloads, checkpoints, recorded metrics."""
