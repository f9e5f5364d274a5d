"""What is sent: JSON, events and errors as bytes, and the turns that long work takes."""
