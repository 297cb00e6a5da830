"""Commands of `kubectl aerie` about resources in a cluster: what people see of them, and the decisions that they make.

    kubectl.py ──► documents ──► resource_view ──► list, status, history, explain, attention   (text for people)
        ▲                              └────────► actions, wait                                (a patch, or why there is none)
        └───────────── patch ◄──────────────────────┘

    commands    the command line, a thin layer over the rest; doctor and savings have pure parts of their own here
    kubectl     transport: every request is made by kubectl, with the flags and the rights of its user

Guarantees: a command starts without the packages of the operator. What is written is tested by the API server against the
resource that was read. Not guaranteed: that the status is up to date, which is the operator's work.
"""
