"""What the stored bits of a weight mean, and how checkpoints name them."""
