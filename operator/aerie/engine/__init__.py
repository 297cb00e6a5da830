"""Aerie's knowledge of vLLM, as data and pure functions: a new vLLM release is a row here and its tests.

Guarantees: nothing here reads a clock, the network, a random source, or a file except the catalog's rows beside the code. Every
fact names its public source: a vLLM pull request or a source file. Not guaranteed: that a release newer than
`releases.NEWEST_VERIFIED_VERSION` still behaves the same.

    releases            releases, image tags, and the release in which each feature came or went
    speculation         the speculation setting: off, static, schedule, adaptive
    arguments           the user's engine arguments, parsed
    command_line        the command line that Aerie writes, its reserved flags, and what a release cannot run
    speculative_config  further keys of the speculative config against a release and its model runner
    serve_command       a complete command line of `vllm serve`, parsed
    completions         greedy completion requests of the equivalence probe, and their responses
    context_length      the longest request that an engine reports

    metrics
      names             vLLM's metric names and what they really count
      exposition        the parser of a metrics exposition
      sample            scrapes and the windows between them
      histogram         the distributions in them
      rates             acceptance, batch size, latency and load in a window
      promql            the same from Prometheus, as range queries

    models
      checkpoint        a model by its config and the headers of its weight files
      config            target and drafter as vLLM sees them
      origin            the project that wrote a drafter's checkpoint
      layer_ids         how that project counts layers, and which of them vLLM reads
      supported_targets target classes that have EAGLE 3, by release
      gpu_memory        whether weights and KV caches fit a GPU
      drafter_catalog   the published drafters

    preflight           the checks that run before a GPU is requested
"""
