"""One folder for each question that users ask of a model's cost."""
