"""The operator: rolls out speculative decoding in vLLM fleets, one `SpeculativeDeployment` at a time.

    cli          the command line `aerie`
    controller   I/O: Kopf's watches, queue, leader election, the API server, scrapes; reads snapshots and applies plans
    checkpoints  I/O: models in folders and on the Hub, headers only
    rollout      pure: from a snapshot to the next actions
    analysis     pure: the sequential comparison of canary and control
    tuning       pure: the choice of a speculation setting
    manifests    pure: builders of the Kubernetes objects
    engine       pure: facts of vLLM
    api          the resource; its CustomResourceDefinition is generated from it

boundary, terminal and yaml_documents serve the command lines of the whole repository. metric_family describes exported metrics.
"""
