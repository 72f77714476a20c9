"""Made by tests/stubs.py."""

from thunder.distributed.accumulation import clip_grad_norm_ as clip_grad_norm_
from thunder.distributed.accumulation import no_sync as no_sync
from thunder.distributed.context_parallel import context_parallel as context_parallel
from thunder.distributed.costs import H200 as H200
from thunder.distributed.costs import Machine as Machine
from thunder.distributed.data_parallel import copy_default_process_group as copy_default_process_group
from thunder.distributed.data_parallel import ddp as ddp
from thunder.distributed.data_parallel import fsdp as fsdp
from thunder.distributed.expert_parallel import expert_parallel as expert_parallel
from thunder.distributed.layout_search import Candidate as Candidate
from thunder.distributed.layout_search import search as search
from thunder.distributed.pipelines import PipelineStage as PipelineStage
from thunder.distributed.pipelines import pipeline_stages as pipeline_stages
from thunder.distributed.placement import FSDPBucketingStrategy as FSDPBucketingStrategy
from thunder.distributed.placement import FSDPType as FSDPType
from thunder.distributed.placement import get_skip_data_parallel_grad_sync as get_skip_data_parallel_grad_sync
from thunder.distributed.placement import reset_skip_data_parallel_grad_sync as reset_skip_data_parallel_grad_sync
from thunder.distributed.placement import set_skip_data_parallel_grad_sync as set_skip_data_parallel_grad_sync
from thunder.distributed.placement import skip_data_parallel_grad_sync as skip_data_parallel_grad_sync
from thunder.distributed.planning import plan as plan
from thunder.distributed.tensor_parallel import column_parallel as column_parallel
from thunder.distributed.tensor_parallel import row_parallel as row_parallel
from thunder.distributed.transforms import DDPTransform as DDPTransform
from thunder.distributed.transforms import FSDPTransform as FSDPTransform
__all__: list[str]
