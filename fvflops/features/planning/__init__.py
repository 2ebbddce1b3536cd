"""Plan a distributed training step: the work of one rank of any mesh."""
