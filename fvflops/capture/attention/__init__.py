"""Masks of attention: the pairs of query and key that are not masked, in fused, decomposed and flex attention."""
