"""Sends notifications of rollouts to receivers over HTTP.

notifier   the queue of each receiver: which notification goes where, retries, losses
config     the file of receivers and default subscriptions, read and checked at the start
receiver   one receiver: its address, headers and format; one request to it
formats    bodies of requests: CloudEvents, Slack, Microsoft Teams, a template
samples    notifications for checks of templates and for `aerie notifications test`
"""
