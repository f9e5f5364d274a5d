"""What the GPUs and the server say of themselves beside a load."""
