"""Load for engines: workloads drawn from a seed, and the real HTTP requests made from them.

workload    requests: classes, lengths, sessions, arrivals
traffic     sends them to a server and checks every answer
background  the same beside something else, from a thread of its own
"""
