"""The endpoint of the plugin (`plugin/aerie_vllm`) that changes the drafter inside a running engine, as its callers see it.

    calls     what can be requested of a pod, and the bodies of the requests
    state     what a pod reports: what it drafts with, its lease, its windows with their counters
    response  the result of a call: a value, or a problem with its reason

Guarantees: pure; nothing here sends a request. What a pod sends is checked field by field, because anybody may have written the
pod's image. Not guaranteed: that a pod which passes the checks reports the truth.
"""
