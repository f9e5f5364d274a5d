"""What answers amount to, and whether it can be believed."""
