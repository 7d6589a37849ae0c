"""splatcli: photos to 3D Gaussian Splats, from the command line."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``splatcli.rasterization``, without loading torch for those who only ask for the version."""
    if name == "rasterization":
        from splatcli.raster.rasterization import rasterization

        return rasterization
    raise AttributeError(f"module 'splatcli' has no attribute {name!r}")
