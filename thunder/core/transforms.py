"""`thunder.core.transforms`: the names by which programs import derivatives, lazy re-exports."""

from thunder._lazy import names_from

_FROM = {
    "thunder.functional_transforms": ("grad", "value_and_grad", "vjp", "jvp", "vmap"),
    "thunder.transforms.derivative": ("get_grad", "put_grad", "put_grads"),
    "thunder.transforms.register_grad": ("register_grad", "register_augmented_forward", "register_backward", "VJPDual"),
    "thunder.api": ("add_transform",),
}
__getattr__, __dir__ = names_from(__name__, _FROM)
