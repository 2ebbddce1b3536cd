"""Random networks that are made from a number alone, each block with its multiply-adds computed by hand beside it."""
