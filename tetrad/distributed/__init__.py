"""What a rank says to the others, and what it does where nobody answers."""
