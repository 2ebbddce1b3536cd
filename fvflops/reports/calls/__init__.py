"""Tables of op calls, module calls and source lines."""
