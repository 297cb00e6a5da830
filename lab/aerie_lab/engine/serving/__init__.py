"""One simulated engine as a process: vLLM's command line in, vLLM's HTTP interface out.

arguments, options  vLLM's flags, and the parameters of the simulation
files, drafter      what vLLM reads of a model and of a drafter before it serves them
setup               the engine that all of these describe
driver              runs the replica by the clock
api, server         requests and answers as data, and the HTTP server

Change of the drafter in place, by the code of Aerie's plugin:
engine_client       vLLM's engine client, on the driver;  engine_core  the cache salts of requests
drafter_worker      the worker's half: reads and checks drafters;  drafter_faults  how it fails, for fault injection
drafter_endpoint    the plugin's middleware in the server;  asgi  an ASGI middleware on aiohttp
"""
