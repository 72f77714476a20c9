"""Programs as new users write them are what they are in eager: captured, or run by the original where thunder refuses."""

import pytest

from tests.scenarios import (  # noqa: F401 - registered
    control,
    differentiation,
    everyday_python,
    histories,
    hooks_and_copies,
    leaves,
    memory,
    models,
    modes,
    numbers,
    python_objects,
    steps,
    tensors,
    training,
    values,
)
from tests.scenarios.compared import PROGRAMS, beside_eager
from thunder.errors import ThunderError

# refused in words: the original runs
BY_THE_ORIGINAL = frozenset(
    """
    generator_result generator_method generator_result_inner coroutine_result async_gen
    asyncio_inside thread_inside pool_inside
    fn_needs_input_grad grad_outputs_batched
    grad_fn_name view_as_complex_argument swap_tensors hook_on_leaf_inside retain_grad_inside retain_grad_stored
    fn_inplace
    checkpoint_bn checkpoint_bn_reentrant ck_bn_inner_step ck_list ck_print ck_counter module_backward_hook_inside module_backward_hook_outside
    pickle_module_inside data_to module_to_inside
    module_half_inside version_counters torch_function_wrapper subclass_made_inside function_mode lossy_saved
    default_dtype manual_seed_inside saved_tensor_hooks sparse_built sparse_coalesce
    tbptt inplace_ops_all iterator_argument heap_beam
    """.split()
)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in BY_THE_ORIGINAL])
def test_program(name):
    beside_eager(PROGRAMS[name], "error")


@pytest.mark.parametrize("name", sorted(BY_THE_ORIGINAL))
def test_program_by_the_original(name):
    beside_eager(PROGRAMS[name], "eager")
    with pytest.raises((AssertionError, ThunderError)):
        beside_eager(PROGRAMS[name], "error")
