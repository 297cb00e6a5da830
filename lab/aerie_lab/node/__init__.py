"""The node agent: the lab's kubelet. One process plays every Node, and runs the pods bound to them as local processes.

agent      watches pods, starts a PodWorker for each; nodes registers Nodes and renews their Leases
pod        one pod from its first sight to its deletion; container one of its containers, restarts included
support    which fields of a pod are honoured: anything else is refused, visibly
environment, volumes, probes, status, logs    what a container gets, how it is asked, how it is told
api        the kubelet's own server, for `kubectl logs`;  events what `kubectl describe` shows
"""
