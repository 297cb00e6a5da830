"""One simulated engine as a process: vLLM's command line in, vLLM's HTTP interface out.

arguments, options  vLLM's flags, and the parameters of the simulation
files, drafter      what vLLM reads of a model and of a drafter before it serves them
setup               the engine that all of these describe
driver              runs the replica by the clock
api, server         requests and answers as data, and the HTTP server
"""
