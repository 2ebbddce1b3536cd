"""Parts of the report of an estimated step: tables, the picture of its pipeline, its data and its timeline."""
