"""The native core from Python: built with ninja, loaded with ctypes, called through one entry."""
