from splatcli.gsplat import export_splats

__all__ = ["export_splats"]
