from splatcli.gsplat import compute_relocation

__all__ = ["compute_relocation"]
