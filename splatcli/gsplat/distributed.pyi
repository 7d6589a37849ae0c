from splatcli.gsplat import cli

__all__ = ["cli"]
