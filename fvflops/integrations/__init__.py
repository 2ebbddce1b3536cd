"""Callbacks for training libraries; each file imports its library."""
