"""Models of an engine and its traffic: acceptance by position, step time, change points."""
