"""Record op calls, regions and storages of a run and build its Trace."""
