"""`aerie diagnose`: one engine in numbers and words, from its own answers.

    engine_reader   GET requests to the engine: over HTTP, or by kubectl through the API server
         │  /metrics several times, /version, /v1/models; for a pod its command line
         ▼
    observation ──► acceptance ──► findings        (what it means, and what to do)
         └──────────────┴────────────┴──────► screen, document

Guarantees: everything but engine_reader is pure. A finding has a source: a measurement, or vLLM's own threads. Not guaranteed:
that the engine answers the truth, or that its traffic of these seconds is its usual traffic.
"""
