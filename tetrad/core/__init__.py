"""The words every room speaks: plain typed data, no torch."""
