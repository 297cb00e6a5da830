"""Metrics of a simulated engine: what vLLM counts, and /metrics as vLLM renders it.

counters            what the engine counts;  exposition  its counters as /metrics
registry            the counters in a registry of prometheus_client
http_exposition     the part of /metrics that is not the engine's
metrics_corruption  corrupt metrics, for fault injection
"""
