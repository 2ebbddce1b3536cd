"""Count the bytes of collectives, by group and module."""
