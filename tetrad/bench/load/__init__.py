"""How it is sent, and how what comes back is read."""
