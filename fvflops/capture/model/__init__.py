"""Read a model's modules, parameters and buffers."""
