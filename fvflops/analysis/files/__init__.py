"""Files that contain a model: their kinds, the gate before those that can run code, and programs of torch.export."""
