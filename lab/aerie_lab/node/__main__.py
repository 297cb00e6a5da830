"""`python -m aerie_lab.node FOLDER`: the node agent of the lab in FOLDER; started by the lab's supervisor."""

from aerie_lab.node.agent import main

main()
