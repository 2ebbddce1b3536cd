"""Callbacks for training libraries, the pytest plugin and fvcore's helpers; a callback's module imports its library."""
