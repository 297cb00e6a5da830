"""All that Aerie knows of vLLM, as data and pure functions: a new vLLM release is a row here and its tests.

Guarantees: nothing here reads a clock, the network, a random source, or a file but the catalog's rows beside its code; every
fact names its public source, a vLLM pull request or source file. Not guaranteed: that a release newer than
`versions.NEWEST_KNOWN` still behaves so.

    versions      releases, image tags, and which feature came or went with which release
    speculation   the speculation setting: off, static, schedule, adaptive
    arguments     what the user's engine arguments imply
    flags         the command line that Aerie writes, its own flags, what a release cannot run
    metrics       vLLM's metric names and what they really count
    page          a metrics page, read
    samples       scrapes, and the windows between them; histogram their distributions
    windows       what a window says of acceptance, batch, latency and load
    checkpoint    a model by its config and the headers of its weight files
    origin        which project wrote a drafter's checkpoint
    layer_ids     how that project counts layers, and which of them vLLM reads
    targets       which target classes have EAGLE 3, by release
    models        target and drafter as vLLM will see them
    memory        whether weights and KV caches fit a GPU
    preflight     the checks before a GPU is asked for
    catalog       the published drafters
"""
