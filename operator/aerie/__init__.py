"""The operator: rolls out speculative decoding in vLLM fleets, one `SpeculativeDeployment` at a time.

cli          the command line `aerie`
controller   the edge: Kopf's watch, queue, lease, the API server, observe and act
checkpoints  the edge to models: folders and the Hub, headers only
rollout      pure: from what was observed to what is to be done
resources    pure: the objects that are made
engine       pure: what is known of vLLM
api          the resource; its definition is generated from it

boundary and terminal are the edge of a process, for the command lines of the whole repository.
"""
