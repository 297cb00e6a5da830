"""The edge: everything that talks to Kubernetes, to engines, or to a clock. What is decided, is decided below it.

Kopf watch ─► mirror ─► queue of keys ─► observe ─► decide (aerie.rollout, pure) ─► act ─► come back after...

edge        Kopf's watches: what is heard of resources and of labelled children goes into the mirror
listing     the same by lists, each kind of each namespace by itself; what cannot be listed is told
mirror      the newest that was heard of each object; what changes adds a key
queue       keys to look at, each once, with back-off per key
lease       one of several operators acts
versions    whether the cluster's definition of the resource is as new as the operator
client      the API server with plain dictionaries
observe     what is there, as the core wants it: from the mirror to see whether there is anything to do, live to do it
scrape      the engines' metrics, read in the background; readings is what is kept of them
act         what the core decided: server-side apply, then status
reconcile   one pass over one key
telemetry   metrics of the operator itself, and whether it is alive
run         puts the parts together, and takes them down in order
"""
