"""The oracle: each family of ops as a plain program over numbers that count what is done with them."""
