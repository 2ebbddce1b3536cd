"""Weights of loaded models: packed, pickled or quantised, and adapters beside them."""
