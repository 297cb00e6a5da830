"""`python -m aerie_lab.supervisor FOLDER ...`: started by `up` as process 1 of the lab in FOLDER."""

from aerie_lab.supervisor.supervisor import main

main()
