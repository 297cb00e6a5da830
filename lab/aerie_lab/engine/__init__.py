"""A simulator of vLLM: its command line, its HTTP interface and its exact metrics over a model of step time and acceptance.

It is for demos, scale and statistics. It proves nothing about vLLM: tests compare it with real vLLM
(tests/vllm/test_simulator_agreement.py), and docs/reference/simulator.md has the agreement.

    performance_model  duration of an engine step, and number of accepted draft tokens
    core               one engine: its steps, one after the other, their scheduling, and the KV cache
    metrics            what vLLM counts, and the counters as /metrics
    load_generation    requests: classes, lengths, arrivals, and their sending over HTTP
    serving            one replica behind vLLM's command line and HTTP interface, in real time
    fleet              many replicas in virtual time
"""
