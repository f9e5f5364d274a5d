"""Routes: a folder for each API that generates, a file for each other kind."""
