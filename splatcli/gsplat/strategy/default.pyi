from splatcli.gsplat import (
    DefaultStrategy,
    compute_relocation,
    duplicate,
    inject_noise_to_position,
    normalized_quat_to_rotmat,
    relocate,
    remove,
    reset_opa,
    sample_add,
    split,
)
from splatcli.train.densify.gsplat_edits import multinomial_sample as _multinomial_sample
from splatcli.train.densify.gsplat_edits import update_param_with_optimizer as _update_param_with_optimizer

__all__ = [
    "DefaultStrategy",
    "_multinomial_sample",
    "_update_param_with_optimizer",
    "compute_relocation",
    "duplicate",
    "inject_noise_to_position",
    "normalized_quat_to_rotmat",
    "relocate",
    "remove",
    "reset_opa",
    "sample_add",
    "split",
]
