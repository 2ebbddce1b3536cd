"""Files that contain a model: their kinds, the check of files that can run code, and programs of torch.export."""
