"""torch.profiler's events with modules, FLOPs and FLOP/s."""
