"""What a run was asked, and what of it changes nothing."""
