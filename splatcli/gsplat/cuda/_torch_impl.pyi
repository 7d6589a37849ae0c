from splatcli.gsplat import accumulate

__all__ = ["accumulate"]
