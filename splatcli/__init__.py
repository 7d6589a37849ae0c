"""splatcli: photos to 3D Gaussian Splats, from the command line."""

__version__ = "0.1.0"
