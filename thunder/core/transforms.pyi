"""Made by tests/stubs.py."""

from thunder.api import add_transform as add_transform
from thunder.functional_transforms import grad as grad
from thunder.functional_transforms import jvp as jvp
from thunder.functional_transforms import value_and_grad as value_and_grad
from thunder.functional_transforms import vjp as vjp
from thunder.functional_transforms import vmap as vmap
from thunder.transforms.derivative import get_grad as get_grad
from thunder.transforms.derivative import put_grad as put_grad
from thunder.transforms.derivative import put_grads as put_grads
from thunder.transforms.register_grad import VJPDual as VJPDual
from thunder.transforms.register_grad import register_augmented_forward as register_augmented_forward
from thunder.transforms.register_grad import register_backward as register_backward
from thunder.transforms.register_grad import register_grad as register_grad
