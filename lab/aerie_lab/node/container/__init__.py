"""One container of a pod: `lifecycle` starts and restarts it, `launch` has a process's inputs, `termination` its end."""
