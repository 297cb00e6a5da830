"""What follows from what was learnt: candidates, their forecast, and the recommendation with its explanation."""
