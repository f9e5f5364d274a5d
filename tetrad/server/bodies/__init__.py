"""What is asked: bodies read and checked, and the fields that APIs share."""
