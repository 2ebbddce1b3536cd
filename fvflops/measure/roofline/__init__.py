"""Roofline: what bounds each op on a device, and the least time it needs."""
