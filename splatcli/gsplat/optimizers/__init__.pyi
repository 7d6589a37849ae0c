from splatcli.gsplat import SelectiveAdam

__all__ = ["SelectiveAdam"]
