"""Throughput and utilisation of each step of a training loop: MFU, HFU, FLOP/s, tokens and samples a second."""
