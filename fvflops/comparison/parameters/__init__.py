"""Count parameters: trainable, frozen, and active for a token."""
