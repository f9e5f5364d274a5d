"""What the API processes of a server share."""
