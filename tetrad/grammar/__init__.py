"""Which tokens may come next in constrained output, found by processes that can be given up."""
