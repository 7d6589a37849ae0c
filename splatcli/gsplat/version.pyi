from splatcli.gsplat import __version__

__all__ = ["__version__"]
