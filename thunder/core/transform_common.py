"""`thunder.core.transform_common`: names by which programs import the base of transforms and two passes, lazy
re-exports."""

from thunder._lazy import names_from

_FROM = {
    "thunder.transforms.base": ("Transform",),
    "thunder.transforms.dce": ("dce",),
    "thunder.transforms.cse": ("cse",),
}
__getattr__, __dir__ = names_from(__name__, _FROM)
