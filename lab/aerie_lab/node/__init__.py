"""The node agent: the lab's kubelet. One process plays every Node, and runs the pods bound to them as local processes.

agent      watches pods, starts a PodWorker for each; nodes registers Nodes and renews their Leases
pod        one pod from start to deletion;  container one of its containers, restarts included
support    which fields of a pod are supported: a pod with any other stays Pending
environment, volumes, probes, status, logs    a container's inputs, its probes, its reports
api        the kubelet's own server, for `kubectl logs`;  events what `kubectl describe` shows
"""
