"""The door: one command, a few verbs, one file each."""
