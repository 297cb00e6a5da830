"""What is written and sent: the status after a step, and notifications."""
