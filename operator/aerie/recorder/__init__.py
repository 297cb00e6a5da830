"""The recorder: a share of the users' prompts, redacted, as files from which a drafter can be trained.

    mirrored requests ─► server ─► sampling ─► prompts ─► redaction ─► hook ─► files ─► objects
                                     (the rest is answered before it is read)   └─ retention ─┘

    settings       what the process is started with, checked
    skip_reasons   the reasons why a request is not recorded
    sampling       the share of the requests, and their number per minute
    prompts        what is recorded of a request
    redaction      patterns that are replaced
    retention      names of files, and which of them are deleted
    hook           the container that redacts too
    files          the file that is written, and complete files in a folder
    objects        complete files in an object store
    metrics        counts for Prometheus
    storage        files and objects as the pipeline uses them
    storage_thread a thread for operations of the storage, and why they fail
    pipeline       a request on its path to the file
    server         the HTTP endpoints
    process        assembles and runs all of it

Guarantees: nothing but messages, tools, template arguments, sampling parameters and the hour leaves the process: no header, no
answer of an engine, no field that names a user or a session. What cannot be redacted is not stored. No prompt is logged, or part
of a metric or an error message. Memory has a limit whatever the traffic and however slow the storage, and so have files that wait
for an upload. The retention continues while the volume is full or an upload fails. Nothing here needs a right in the cluster, and
no user's request waits for it. sampling, prompts, redaction and retention are pure.

Not guaranteed: that a request is recorded at all; whatever exceeds a limit is dropped. Nor that patterns find every personal
detail.
"""
