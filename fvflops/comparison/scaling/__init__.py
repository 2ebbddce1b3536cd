"""Cost as an exact polynomial of sizes."""
