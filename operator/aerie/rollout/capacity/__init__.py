"""How many pods each arm has, which traffic it gets, and in which order both change."""
