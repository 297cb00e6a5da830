"""Model of an engine's performance: duration of a step, accepted draft tokens, prefix cache, and the requests that they concern.

step         duration of a step;  step_noise  its random factors
acceptance   number of accepted draft tokens;  step_sequence  a request's next steps, drawn in advance
request      requests and an engine's limits;  prefix  the tokens of a prompt that are in the prefix cache
"""
