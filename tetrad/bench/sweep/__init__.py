"""Many runs, over what a sweep varies."""
