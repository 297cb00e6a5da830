"""A simulator of vLLM: its command line, its HTTP interface and its exact metrics over a model of step time and acceptance.

For demos, scale and statistics. It never proves an engine fact: what it claims of vLLM is tested against real vLLM
(tests/vllm/test_simulator_agreement.py), and docs/simulator.md says how far the agreement goes.

    step        how long an engine step takes                    acceptance   how many drafted tokens are accepted
    replica     one engine: scheduler, batch, KV cache           counters     what vLLM counts, and when
    workload    requests: classes, lengths, arrivals             page         the counters as /metrics
    fleet       many replicas in virtual time                    server       one replica behind HTTP, in real time
"""
