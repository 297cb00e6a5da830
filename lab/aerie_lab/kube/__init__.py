"""The lab's client of the Kubernetes API: small, asynchronous, plain dicts (client.py, connector.py), and informers."""
