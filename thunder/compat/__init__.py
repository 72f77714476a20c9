"""Everything of PyTorch's that has no public name: `compat.<name>` is a row of `names.PRIVATE`, or a function of one of
this package's files that uses such rows.

A name is looked up when it is first asked for, and stands in this module from then on. So a PyTorch without it can be
imported, and a program that does not need it runs. Say `from thunder import compat` and then `compat.name`; `from
thunder.compat import name` would look it up at import.
"""

from __future__ import annotations

from typing import Any

from thunder._lazy import names_from
from thunder.compat.names import BY_NAME, AtFirstUse

_home, __dir__ = names_from(
    __name__,
    {
        "thunder.compat.modes": (
            "modes_key", "without_stance", "describe_modes", "set_data_parallel", "note_registration",
            "grad_enabled_in", "inference_in", "autocast_in",
            "function_modes_in",
            "without_function_modes", "modes_restored",
            "default_device", "foreign_tracer", "is_exporting",
        ),
        "thunder.compat.torch_settings": (
            "settings", "beside_modes", "kernel_settings", "kernel_flags", "changed_settings", "set_settings",
            "settings_are",
            "picklable_settings",
        ),
        "thunder.compat.autocast": ("autocast_state", "autocast_casts", "composed", "casts_keep_grad_mode",
        "autocast_nesting", "autocast_on", "autocast_off", "AUTOCAST_KINDS"),
        "thunder.compat.cuda": ("load_kernel", "attention_backends", "attention_among"),
        "thunder.compat.batch_checks": ("tensor_batch_check", "native_batch_check"),
        "thunder.compat.autograd": ("keeps_graph", "saved_by_hooks", "gradients", "run_backward",
        "applying", "will_run", "accumulated_in_place"),
        "thunder.compat.functorch": ("is_batch", "in_forward_mode", "in_functorch", "unwrap_of",
        "functorch_implementations"),
        "thunder.compat.fake_tensors": (
            "fake_mode_of_sizes", "quiet_fake_tensors", "run_on_fakes", "symbolic_sizes",
        ),
        "thunder.compat.inductor": ("compile_with_inductor", "compile_for_sizes", "graph_job", "inductor_source"),
        "thunder.compat.dispatcher": ("functions_called", "operators", "kernel", "unless_removed", "foreach",
        "existing", "scripted", "scripted_from", "is_disabled", "children_of", "scan_keeps_dim", "has_meta_kernel"),
        "thunder.compat.probes": ("probing", "drawing_apart", "quiet"),
        "thunder.compat.distributed": ("distributed_is_used", "default_store", "timeout_of", "local_tensor",
        "set_local_tensor", "dtensor_like", "FullyShard", "is_fully_sharded", "fully_sharded", "mixed_precision_of",
        "fully_shard_hooks", "fully_shard_options", "DataParallel", "data_parallel_of", "broadcasts_buffers"),
    },
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in BY_NAME:
        value = globals()[name] = BY_NAME[name].value()
    else:
        value = _home(name)
        if isinstance(value, AtFirstUse):
            value = globals()[name] = value.make()
    return value
