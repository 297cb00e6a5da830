"""The tuner: its worker process, and its state per resource.

tuner           decides once an interval
session         state of one resource: windows between scrapes
inputs          what a decision depends on; revision_facts and startup_time read it from records and pods
worker_client   starts the worker process, and requests decisions from it
"""
