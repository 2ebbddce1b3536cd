"""Peaks of devices, and the share of them that a measured time achieved: MFU and HFU."""
