"""Code shared by commands that plan training steps."""
