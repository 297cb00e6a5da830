"""The engine's pod: its template, what users merge into it, and where it is scheduled."""
