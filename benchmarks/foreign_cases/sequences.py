"""Attention, recurrence and language: layers and small models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foreign_cases.common import Applied, case, images, part, tokens, vectors

# fmt: off
case("lambda_networks", "LambdaLayer of neighbours", lambda m: m.LambdaLayer(dim=8, dim_k=4, r=3, heads=2),
     images(6, 8))
case("lambda_networks", "LambdaLayer of all", lambda m: m.LambdaLayer(dim=8, dim_k=4, n=6, heads=2), images(6, 8))
case("slot_attention", "SlotAttention", lambda m: m.SlotAttention(num_slots=3, dim=8, hidden_dim=8), vectors(6, 8))
case("slot_attention", "MultiHeadSlotAttention",
     lambda m: m.MultiHeadSlotAttention(num_slots=3, dim=8, heads=2, dim_head=4, hidden_dim=8), vectors(6, 8))
case("slot_attention", "AdaptiveSlotWrapper",
     lambda m: m.AdaptiveSlotWrapper(m.SlotAttention(num_slots=3, dim=8, hidden_dim=8)), vectors(6, 8))
case("invariant_point_attention", "IPABlock",
     lambda m: Applied(m.IPABlock(dim=8, heads=2, require_pairwise_repr=False),
        lambda f, x: f(x, rotations=torch.eye(3).expand(*x.shape[:2], 3, 3), translations=x[..., :3])), vectors(5, 8))
case("invariant_point_attention", "InvariantPointAttention",
     lambda m: Applied(m.InvariantPointAttention(dim=8, heads=2, pairwise_repr_dim=4),
        lambda f, x, y: f(x, y, rotations=torch.eye(3).expand(*x.shape[:2], 3, 3), translations=x[..., :3])),
     lambda b: (torch.randn(b, 5, 8), torch.randn(b, 5, 5, 4)))
case("axial_attention", "AxialAttention", lambda m: m.AxialAttention(dim=8, dim_index=1, heads=2), images(6, 8))
case("axial_attention", "AxialImageTransformer",
     lambda m: m.AxialImageTransformer(dim=8, depth=1, heads=2, dim_heads=4, reversible=False), images(6, 8))
case("axial_attention", "reversible", lambda m: m.AxialImageTransformer(dim=8, depth=1, heads=2, dim_heads=4),
     images(6, 8))
case("conformer", "ConformerBlock", lambda m: m.ConformerBlock(dim=8, heads=2, dim_head=4, conv_kernel_size=3),
     vectors(6, 8))
case("conformer", "causal",
     lambda m: m.Conformer(8, depth=2, heads=2, dim_head=4, conv_kernel_size=3, conv_causal=True), vectors(6, 8))
case("linear_attention_transformer", "language",
     lambda m: m.LinearAttentionTransformerLM(num_tokens=64, dim=16, heads=2, depth=1, max_seq_len=16, causal=True,
        blindspot_size=4, n_local_attn_heads=1, local_attn_window_size=8), tokens(16))
case("linear_attention_transformer", "ImageLinearAttention",
     lambda m: m.ImageLinearAttention(chan=8, heads=2, key_dim=4), images(6, 8))
case("sinkhorn_transformer", "language",
     lambda m: m.SinkhornTransformerLM(num_tokens=64, dim=16, heads=2, depth=1, max_seq_len=16, bucket_size=4),
     tokens(16))
case("sinkhorn_transformer", "causal",
     lambda m: m.SinkhornTransformerLM(num_tokens=64, dim=16, heads=2, depth=1, max_seq_len=16, bucket_size=4,
        causal=True), tokens(16))
case("memory_efficient_attention_pytorch", "Attention",
     lambda m: m.Attention(dim=8, heads=2, dim_head=4, causal=True, memory_efficient=True, q_bucket_size=4,
        k_bucket_size=4), vectors(8, 8))
case("memory_efficient_attention_pytorch", "CosineSimAttention",
     lambda m: m.CosineSimAttention(dim=8, seq_len=8, heads=2, dim_head=4, causal=True), vectors(8, 8))
case("memory_efficient_attention_pytorch", "FlashAttention",
     lambda m: part(m, "flash_attention").FlashAttention(dim=8, heads=2, dim_head=4, causal=True, q_bucket_size=4,
        k_bucket_size=4), vectors(8, 8))
case("axial_positional_embedding", "added", lambda m: m.AxialPositionalEmbedding(dim=8, axial_shape=(2, 4)),
     vectors(8, 8))
case("axial_positional_embedding", "joined",
     lambda m: m.AxialPositionalEmbedding(dim=8, axial_shape=(2, 4), axial_dims=(4, 4)), vectors(8, 8))
case("product_key_memory", "PKM", lambda m: m.PKM(dim=8, heads=2, num_keys=8, topk=4, dim_head=8), vectors(6, 8))
case("product_key_memory", "differentiable",
     lambda m: m.PKM(dim=8, heads=2, num_keys=8, topk=4, dim_head=8, differentiable_topk=True), vectors(6, 8))
case("halonet_pytorch", "HaloAttention",
     lambda m: m.HaloAttention(dim=8, block_size=2, halo_size=1, dim_head=4, heads=2), images(8, 8))
case("gateloop_transformer", "Transformer",
     lambda m: m.Transformer(dim=16, num_tokens=64, depth=1, heads=2, dim_head=8), tokens(12))
case("gateloop_transformer", "SimpleGateLoopLayer", lambda m: m.SimpleGateLoopLayer(dim=8), vectors(8, 8))
case("gateloop_transformer", "heinsen", lambda m: m.SimpleGateLoopLayer(dim=8, use_heinsen=True), vectors(8, 8))
case("block_recurrent_transformer_pytorch", "language",
     lambda m: m.BlockRecurrentTransformer(num_tokens=64, dim=16, depth=2, dim_head=8, heads=2, max_seq_len=16,
        block_width=8, num_state_vectors=4, recurrent_layers=(1,)), tokens(16))
case("recurrent_memory_transformer_pytorch", "language",
     lambda m: m.RecurrentMemoryTransformer(dim=16, num_tokens=64, depth=1, num_memory_tokens=2, seq_len=16, heads=2,
        dim_head=8), tokens(16))
case("native_sparse_attention_pytorch", "SparseAttention",
     lambda m: m.SparseAttention(dim=16, dim_head=8, heads=2, sliding_window_size=2, compress_block_size=4,
        compress_block_sliding_stride=2, selection_block_size=4, num_selected_blocks=2, causal=True), vectors(16, 16))
case("ring_attention_pytorch", "RingTransformer",
     lambda m: m.RingTransformer(num_tokens=64, dim=16, depth=1, causal=True, dim_head=8, heads=2, bucket_size=8,
        use_cuda_kernel=False, ring_attn=False), tokens(16))
case("colt5_attention", "ConditionalRoutedFeedForward",
     lambda m: m.ConditionalRoutedFeedForward(dim=8, num_heavy_tokens=4), vectors(8, 8))
case("colt5_attention", "ConditionalRoutedAttention",
     lambda m: m.ConditionalRoutedAttention(dim=8, num_heavy_tokens_q=4, num_heavy_tokens_kv=4, light_dim_head=4,
        light_heads=2, light_window_size=4, heavy_dim_head=4, heavy_heads=2), vectors(8, 8))
case("titans_pytorch", "NeuralMemory",
     lambda m: Applied(m.NeuralMemory(dim=8, chunk_size=4), lambda f, x: f(x)[0]), vectors(8, 8))
case("titans_pytorch", "MemoryAsContextTransformer",
     lambda m: m.MemoryAsContextTransformer(num_tokens=64, dim=16, depth=2, segment_len=4, heads=2, dim_head=8,
        num_persist_mem_tokens=1, num_longterm_mem_tokens=1, neural_memory_layers=()), tokens(12))


class Streams(nn.Module):
    def __init__(self, m: Any):
        super().__init__()
        init, self.expand, self.reduce = m.get_init_and_expand_reduce_stream_functions(2)
        self.inside = init(dim=8, branch=nn.Linear(8, 8))

    def forward(self, x):
        return self.reduce(self.inside(self.expand(x)))


case("hyper_connections", "streams", Streams, vectors(6, 8))
case("mambapy", "parallel scan",
     lambda m: part(m, "mamba").Mamba(part(m, "mamba").MambaConfig(d_model=8, n_layers=1, d_state=4)), vectors(8, 8))
case("mambapy", "sequential",
     lambda m: part(m, "mamba").Mamba(part(m, "mamba").MambaConfig(d_model=8, n_layers=1, d_state=4, pscan=False)),
     vectors(6, 8))
case("mambapy", "mamba in two layers",
     lambda m: part(m, "mamba").Mamba(part(m, "mamba").MambaConfig(d_model=8, n_layers=2, d_state=4,
        inner_layernorms=True, bias=True)), vectors(8, 8))
case("esm", "ESM2", lambda m: m.ESM2(num_layers=1, embed_dim=16, attention_heads=2), lambda b:
     (torch.randint(4, 24, (b, 10)),))
case("esm", "contacts", lambda m: Applied(m.ESM2(num_layers=1, embed_dim=16, attention_heads=2), lambda f, x:
     f(x, return_contacts=True)["contacts"]), lambda b: (torch.randint(4, 24, (b, 10)),))
case("esm", "ProteinBertModel layer", lambda m: Applied(part(m, "modules").TransformerLayer(16, 32, 2), lambda f, x:
     f(x.transpose(0, 1))[0]), vectors(6, 16))
case("torchcrf", "likelihood", lambda m: Applied(m.CRF(5, batch_first=True), lambda f, x, y: -f(x, y)),
     lambda b: (torch.randn(b, 6, 5), torch.randint(0, 5, (b, 6))))
case("torchcrf", "mask", lambda m: Applied(m.CRF(5, batch_first=True), lambda f, x, y:
     -f(x, y, torch.arange(6).expand(len(x), 6) < 4, reduction="token_mean")),
     lambda b: (torch.randn(b, 6, 5), torch.randint(0, 5, (b, 6))))
case("torchcrf", "decode", lambda m: Applied(m.CRF(5, batch_first=True), lambda f, x:
     (x * 2, torch.tensor(f.decode(x)))), vectors(6, 5))
for _name in ("partition", "marginals", "entropy", "max"):
    case("torch_struct", f"LinearChainCRF {_name}", lambda m, n=_name: Applied(nn.Linear(4, 16), lambda f, x:
        getattr(m.LinearChainCRF(f(x).view(len(x), 5, 4, 4)), n)), vectors(5, 4))
case("torch_struct", "HMM", lambda m: Applied(nn.Linear(4, 4), lambda f, x: m.LinearChainCRF(m.LinearChain.hmm(
     f(torch.ones(4, 4)).log_softmax(0), f(torch.eye(4)).log_softmax(0), f(torch.ones(4)).log_softmax(0), x.argmax(-1))
     ).partition), vectors(5, 4))
case("recurrent_memory_transformer_pytorch", "wrapper",
     lambda m: Applied(m.RecurrentMemoryTransformerWrapper(m.RecurrentMemoryTransformer(dim=16, num_tokens=64, depth=1,
        num_memory_tokens=2, seq_len=8, heads=2, dim_head=8, rotary_pos_emb=True)),
        lambda f, x: f(x, return_loss=True)), tokens(17))
