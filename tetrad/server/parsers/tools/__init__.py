"""Tool calls, in each format that models write them in."""
