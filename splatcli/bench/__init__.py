"""Repeated measurements: scenes times settings times seeds, each a run of its own process."""
