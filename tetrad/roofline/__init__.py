"""What a step costs, and how fast it could be at best. No torch: only ops' contracts."""
