"""One canary: its state machine, its analysis, its transitions, and the time after its promotion."""
