from splatcli.gsplat import DefaultStrategy, MCMCStrategy, Strategy

__all__ = ["DefaultStrategy", "MCMCStrategy", "Strategy"]
