"""Process 1 of a lab, and what it runs. Imports little: it lives as long as the lab does.

supervisor   starts the components, keeps them running, serves the lab's ports on the machine
components   their command lines, as data
"""
