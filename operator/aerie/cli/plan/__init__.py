"""`kubectl aerie plan`: what an apply would do to the pods of a resource and to its users, before it is applied.

    command ─┬─► cluster_reader ─► kubectl: server-side dry run, live resource, its objects, nodes
             ├─► change             what the operator would start, by its own decisions
             ├─► preflight_summary  the checks of `aerie preflight`
             ├─► capacity           pods and GPUs, and the nodes that they fit on
             ├─► consequences       what users notice, and until when a promotion is reverted without a reload
             ├─► template_diff      the pods before and after
             └─► rollout_plan ─┬─► screen      text for a terminal
                               └─► document    for programs

Guarantees: nothing is written. The rollout is the one that the operator of this release decides on. Not guaranteed: what only the
operator knows, which is the reports of engines, its concurrency limits and its recommendations.
"""
