"""Cases of distributed runs, shared by tests and the processes that they start."""
