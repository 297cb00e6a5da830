"""How a change of a resource reaches its fleet: pure functions from what was observed to what is to be done.

    observed     what the edge gathered about one resource
    plan         what is to be done about it: objects to apply and delete, status, events, when to come back
    decide       the step from one to the other
    choice       the drafter of a resource that names none
    wanted       the revision that the spec asks for
    verdict      what the preflight Job says
    course       which revisions have pods, and what is said about it
    canary       a canary one look further, with these parts:
      machine      its phases as a table
      fleet        the arms as they are, and how many pods each is to have
      capacity     places for pods; traffic: weights
      evidence     what its analysis knows (analysis: the statistics)
      faults       what ends it at once
      sentences    what is said of it
    children     the objects that have to be there
    report       the status
    conditions   the four conditions, and when they change
    figures      what the engines achieve, and when that is worth a write
    leftovers    what is left of a resource that was deleted, beside one of the same name
    pods         why a pod does not serve, in the words of the cluster

Guarantee: nothing here reads a clock, the network or a random source; all that has to survive a crash is in the status.
"""
