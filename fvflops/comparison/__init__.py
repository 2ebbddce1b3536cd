"""Compare costs: of versions of a model, of conventions, of sizes, with a budget, and of parameters."""
