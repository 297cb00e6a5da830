"""The evaluator: both drafters answer the same requests, and only counts of their answers leave the process.

    mirrored requests ─► server ─► admission ─► requests ─► replay ─┬─► canary  ─► answers ─┐
    a file of prompts ─► prompts ──────┘  (the rest is dropped)     └─► control ─► answers ─┴─► batches ─► the operator

    settings       what the process is started with, checked
    skip_reasons   the reasons why a request gives no pair
    keyed_hash     hashes of tenants, conversations and requests, which mean nothing outside the process
    requests       the request that both engines get, or the reason why they get none
    answers        the counts of an answer
    replay         sends a request to both engines
    prompts        requests from a file
    pairs          what is counted of the two answers to a request
    failures       separate failures of one engine, and the outage that it is in
    batches        counts of pairs, until the operator has them
    metrics        the same counts for Prometheus
    admission      the limit of requests in memory
    pipeline       a request on its path from admission to the batches
    server         the HTTP endpoints
    process        assembles and runs all of it

Guarantees: no prompt and no answer is stored, logged, or part of a metric, an error message or a batch. A request is in memory
only while the engines answer it, and memory has a limit whatever the traffic. Nothing here needs a right in the cluster. Not
guaranteed: that a request is evaluated at all; whatever exceeds the engines' capacity is dropped, and a restart loses the pairs
that the operator has not read.
"""
