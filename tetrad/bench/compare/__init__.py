"""Two servers under the same load."""
