"""Models by their names in libraries: zoo, timm, torchvision, open_clip and torch.hub folders."""
