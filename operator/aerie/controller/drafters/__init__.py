"""Reads and changes the drafters inside running engines, through the endpoint of the plugin in each pod.

client    one call to one pod
executor  the pods of all resources: who is read, who is changed, what was observed
"""
