"""Service addresses: a userspace proxy over real EndpointSlices, in the place of kube-proxy."""
