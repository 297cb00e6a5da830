"""What is to be: the desired revision, its drafter, its pod template and its preflight."""
