"""Who asks: what is known of a request, what its key opens, and how many may wait."""
