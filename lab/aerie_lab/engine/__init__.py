"""A simulator of vLLM: its command line, its HTTP interface and its exact metrics over a model of step time and acceptance.

It is for demos, scale and statistics. It proves nothing about vLLM: tests compare it with real vLLM
(tests/vllm/test_simulator_agreement.py), and docs/simulator.md has the agreement.

    step        duration of an engine step                       acceptance   number of accepted draft tokens
    replica     one engine: its steps, one after the other       counters     what vLLM counts, and when
    scheduling  who is in a step, and the KV cache
    workload    requests: classes, lengths, arrivals             exposition   the counters as /metrics
    fleet       many replicas in virtual time                    server       one replica behind HTTP, in real time
"""
