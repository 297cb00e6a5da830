"""I/O layer of the operator: all code that talks to Kubernetes or to engines, or reads a clock.

It makes no decision about a rollout. Those are made in aerie.rollout, which is pure.

    Kopf watch ─► cache ─► queue of keys ─► observe ─► reconcile plan (aerie.rollout, pure) ─► apply ─► requeue after...

    operator              starts the parts, and stops them in order
    reconciler            one reconcile of one resource, and the workers
    work_queue            resources to reconcile, each once, with back-off per resource; fair_queue shares its turns
    leader_election       of several operators, one acts
    concurrency           how many rollouts and trials may be in progress at the same time
    notifications         notifications of rollouts, by HTTP POST: CloudEvents, Slack, Microsoft Teams, templates
    tracing               traces of reconciles, as an option
    metrics               metrics of the operator itself, liveness and readiness
    clock                 the time of day without jumps
    kubernetes.client     the API server, with plain dictionaries
    kubernetes.cache      informer cache: the newest known version of each object; a change enqueues its resource
    kubernetes.watches    Kopf's watches: events of resources, children and pods go into the cache
    kubernetes.listing    lists of each kind in each namespace go into the cache; reports what cannot be listed
    kubernetes.observe    the snapshot of one resource: from the cache, or live before anything is written
    kubernetes.apply      carries out a plan: server-side apply, deletions, then the status
    kubernetes.nodes      labels of nodes that identify their hardware
    kubernetes.job_events  why a Job has no pod
    kubernetes.kubeconfig  credentials for the API server
    kubernetes.crd_version  whether the installed CustomResourceDefinition is as new as the operator
    scraping              engines' metrics, read in the background
    collection            blocks for analyses and for the calibration
    probes                requests to engines: fixed prompts, and the context length
    tuning                the tuner: its worker process and its state per resource
"""
