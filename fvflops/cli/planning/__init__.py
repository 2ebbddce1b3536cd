"""What commands share that plan training steps."""
