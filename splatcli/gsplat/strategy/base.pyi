from splatcli.gsplat import Strategy

__all__ = ["Strategy"]
