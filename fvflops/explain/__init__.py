"""Where the time of a step went, from chrome traces of torch.profiler."""
