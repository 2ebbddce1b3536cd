"""Tables and trees exactly as fvcore prints them."""
