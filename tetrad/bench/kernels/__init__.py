"""Every op and every backend, timed."""
