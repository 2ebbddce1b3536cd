"""Callbacks for training libraries, and the pytest plugin; each module imports its library."""
