"""Cost of generating text: prefill and decode."""
