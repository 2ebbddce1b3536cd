"""Plan a distributed training step: what one rank of any mesh does."""
