"""What a run sends, and when."""
