"""Fine-tuning with peft, TRL and sentence-transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .common import (
    MODELS,
    Compile,
    Run,
    model_of,
    program,
    sentences,
    tokenizer,
    tokens,
    trained,
    weights,
)  # fmt: skip


# --- peft
def adapt(config: str, name: str = "llama", **options: Any) -> nn.Module:
    import peft

    torch.manual_seed(1)
    base = model_of(name)
    torch.manual_seed(1)
    return peft.get_peft_model(base, getattr(peft, config)(**options))


def steps_of(model: nn.Module, name: str, count: int = 3, dtype: torch.dtype | None = None) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    if name == "vit":
        inputs = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 256).view(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
    else:
        inputs = {"input_ids": tokens(2, 9), "labels": torch.tensor([0, 2]) if name == "bert" else tokens(2, 9)}

    def loss_of(model: nn.Module, arguments: dict) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return model(**arguments).loss

    return trained(model, optimizer, loss_of, [inputs] * count)


def scores_of(model: nn.Module, name: str) -> torch.Tensor:
    inputs = torch.linspace(1, -1, 2 * 3 * 256).view(2, 3, 16, 16) if name == "vit" else tokens(2, 9).flip(0)
    more = {"decoder_input_ids": tokens(2, 5)} if name == "t5" else {}
    with torch.no_grad():
        return model(inputs, **more).logits


def adapted(config: str, name: str = "llama", dtype: torch.dtype | None = None, **options: Any) -> Run:
    """Trained, saved, loaded by the plain library, merged where the method merges, unloaded."""

    def run(compiled: Compile) -> Any:
        import peft

        model = compiled(adapt(config, name, **options))
        losses = steps_of(model, name, dtype=dtype)
        model.eval()
        results = [losses, scores_of(model, name)]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = peft.PeftModel.from_pretrained(model_of(name), folder).eval()
        results += [scores_of(again, name), peft.get_peft_model_state_dict(model)]
        if config in ("LoraConfig", "LoHaConfig", "LoKrConfig", "IA3Config", "OFTConfig", "BOFTConfig", "VeraConfig"):
            results.append(scores_of(compiled(model.merge_and_unload()), name))
        return results

    return run


_LINEAR = {"target_modules": ["q_proj", "v_proj"]}
_LORA = _LINEAR | {"r": 4}
for _title, _config, _options in (
    ("LoRA", "LoraConfig", _LORA),
    ("LoRA of GPT-2", "LoraConfig", {"name": "gpt2", "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    ("LoRA of ViT, a head that is trained", "LoraConfig",
     {"name": "vit", "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}),
    ("LoRA of BERT", "LoraConfig", {"name": "bert", "task_type": "SEQ_CLS", "target_modules": ["query", "value"]}),
    ("LoRA of T5", "LoraConfig", {"name": "t5", "task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "v"]}),
    ("LoRA of all linear layers", "LoraConfig", {"target_modules": "all-linear", "r": 4, "bias": "all"}),
    ("LoRA of embeddings", "LoraConfig", {"target_modules": ["embed_tokens", "q_proj"], "r": 4}),
    ("LoRA with dropout", "LoraConfig", _LORA | {"lora_dropout": 0.2}),
    ("LoRA with ranks by pattern", "LoraConfig", _LORA | {"rank_pattern": {"q_proj": 2}}),
    ("rank-stabilized LoRA", "LoraConfig", _LORA | {"use_rslora": True}),
    ("DoRA", "LoraConfig", _LORA | {"use_dora": True}),
    ("DoRA with dropout", "LoraConfig", _LORA | {"use_dora": True, "lora_dropout": 0.1}),
    ("trainable tokens", "LoraConfig", _LORA | {"trainable_token_indices": [4, 5]}),
    ("LoHa", "LoHaConfig", _LORA),
    ("LoKr", "LoKrConfig", _LORA),
    ("VeRA", "VeraConfig", {"target_modules": ["q_proj"], "r": 4}),
    ("IA3", "IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("OFT", "OFTConfig", _LINEAR | {"oft_block_size": 4}),
    ("BOFT", "BOFTConfig", {"target_modules": ["q_proj"], "boft_block_size": 4}),
    ("AdaLoRA", "AdaLoraConfig", _LINEAR | {"init_r": 4, "target_r": 2, "total_step": 10}),
    ("FourierFT", "FourierFTConfig", _LINEAR | {"n_frequency": 8}),
    ("HRA", "HRAConfig", _LORA),
    ("norms", "LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    ("prompt tuning", "PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
    ("prefix tuning", "PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
    ("p-tuning", "PromptEncoderConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    ("prompt tuning of T5", "PromptTuningConfig",
     {"name": "t5", "task_type": "SEQ_2_SEQ_LM", "num_virtual_tokens": 3}),
):  # fmt: skip
    program("peft", _title)(adapted(_config, **_options))
program("peft", "LoRA, bf16", "bf16")(adapted("LoraConfig", dtype=torch.bfloat16, **_LORA))
program("peft", "DoRA, bf16", "bf16")(adapted("LoraConfig", dtype=torch.bfloat16, use_dora=True, **_LORA))


@program("peft", "two adapters: chosen, mixed, disabled, merged and unmerged")
def adapters_of_one_model(compiled: Compile) -> Any:
    import peft

    model = compiled(adapt("LoraConfig", r=4, init_lora_weights=False, **_LINEAR))
    model.add_adapter("second", peft.LoraConfig(r=2, init_lora_weights=False, **_LINEAR))
    results = [scores_of(model, "llama")]
    model.set_adapter("second")
    results += [steps_of(model, "llama"), scores_of(model, "llama")]
    with model.disable_adapter():
        results.append(scores_of(model, "llama"))
    model.add_weighted_adapter(["default", "second"], [0.5, 0.25], "both", combination_type="cat")
    model.set_adapter("both")
    results.append(scores_of(model, "llama"))
    model.merge_adapter()
    results.append(scores_of(model, "llama"))
    model.unmerge_adapter()
    results.append(scores_of(model, "llama"))
    model.delete_adapter("both")
    model.set_adapter("default")
    return results, scores_of(model, "llama")


@program("peft", "adapters named by the rows of a batch")
def mixed_batch(compiled: Compile) -> Any:
    import peft

    model = adapt("LoraConfig", r=4, init_lora_weights=False, **_LINEAR)
    model.add_adapter("second", peft.LoraConfig(r=2, init_lora_weights=False, **_LINEAR))
    model = compiled(model.eval())
    with torch.no_grad():
        return [model(input_ids=tokens(3, 9), adapter_names=names).logits
                for names in (["default", "second", "__base__"], ["second", "default", "default"])]  # fmt: skip


@program("peft", "a compiled model is given adapters")
def compiled_before(compiled: Compile) -> Any:
    import peft

    torch.manual_seed(1)
    model = peft.get_peft_model(compiled(model_of("llama")), peft.LoraConfig(r=4, **_LINEAR))
    return steps_of(model, "llama"), scores_of(model, "llama"), peft.get_peft_model_state_dict(model)


@program("peft", "gradient checkpointing, merged, generate")
def generating_adapter(compiled: Compile) -> Any:
    model = adapt("LoraConfig", r=4, task_type="CAUSAL_LM", **_LINEAR)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = compiled(model.train())
    losses = steps_of(model, "llama")
    model.gradient_checkpointing_disable()
    model.eval()
    merged = compiled(model.merge_and_unload())
    return losses, merged.generate(input_ids=tokens(2, 5), max_new_tokens=6, do_sample=False)


@program("peft", "transformers.Trainer, a checkpoint that is resumed")
def adapter_in_trainer(compiled: Compile) -> Any:
    import peft
    import transformers

    data = [{"input_ids": row, "labels": row} for row in tokens(16, 9)]
    with tempfile.TemporaryDirectory() as folder:
        for resumes in (False, True):
            arguments = transformers.TrainingArguments(
                folder, max_steps=4, per_device_train_batch_size=4, report_to=[], logging_steps=1, use_cpu=True,
                save_steps=2, disable_tqdm=True, label_names=["labels"],
            )  # fmt: skip
            trainer = transformers.Trainer(compiled(adapt("LoraConfig", r=4, **_LINEAR)), arguments, train_dataset=data)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes else None)
        trainer.save_model(f"{folder}/saved")
        again = peft.PeftModel.from_pretrained(model_of("llama"), f"{folder}/saved")
        return (
            [h["loss"] for h in trainer.state.log_history if "loss" in h],
            weights(trainer.model),
            scores_of(again, "llama"),
        )


# --- TRL
def tuned(kind: str, columns: dict[str, int], name: str = "llama", adapts: bool = False, **settings: Any) -> Run:
    """A trainer of TRL's. columns: the seeds of the texts in each column."""

    def run(compiled: Compile) -> Any:
        import datasets
        import peft
        import trl

        data = datasets.Dataset.from_dict({column: sentences(seed) for column, seed in columns.items()})
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            defaults = {
                "max_steps": 3, "per_device_train_batch_size": 4, "report_to": [], "logging_steps": 1, "use_cpu": True,
                "seed": 0, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
            }  # fmt: skip
            more: dict[str, Any] = {}
            model = model_of(name)
            if kind == "Reward":
                import transformers

                torch.manual_seed(0)
                model = transformers.LlamaForSequenceClassification(
                    transformers.LlamaConfig(**MODELS["llama"][2], num_labels=1)
                )
            if adapts:
                more["peft_config"] = peft.LoraConfig(r=4, **_LINEAR)
            elif kind in ("DPO", "KTO"):
                more["ref_model"] = model_of(name)
            if kind == "GRPO":
                more["reward_funcs"] = lambda completion_ids, **_: [float(sum(row) % 7) for row in completion_ids]
            if kind == "KTO":
                data = data.add_column("label", [True, False] * (len(data) // 2))
            trainer = getattr(trl, f"{kind}Trainer")(
                model=compiled(model), args=getattr(trl, f"{kind}Config")(folder, **defaults | settings),
                train_dataset=data, processing_class=tokenizer(), **more,
            )  # fmt: skip
            trainer.train()
            trainer.save_model(f"{folder}/saved")
            return [h["loss"] for h in trainer.state.log_history if "loss" in h], weights(trainer.model)

    return run


_PAIRS = {"prompt": 0, "chosen": 1, "rejected": 2}
for _title, _kind, _columns, _options in (
    ("SFTTrainer", "SFT", {"text": 0}, {"max_length": 16}),
    ("SFTTrainer, GPT-2, packed", "SFT", {"text": 0}, {"name": "gpt2", "max_length": 16, "packing": True}),
    ("SFTTrainer, completions only", "SFT", {"prompt": 0, "completion": 1}, {"max_length": 16}),
    ("SFTTrainer, LoRA, accumulation", "SFT", {"text": 0},
     {"max_length": 16, "adapts": True, "gradient_accumulation_steps": 2}),
    ("SFTTrainer, gradient checkpointing", "SFT", {"text": 0}, {"max_length": 16, "gradient_checkpointing": True}),
    ("DPOTrainer", "DPO", _PAIRS, {"max_length": 16}),
    ("DPOTrainer, LoRA", "DPO", _PAIRS, {"max_length": 16, "adapts": True}),
    ("DPOTrainer, IPO", "DPO", _PAIRS, {"max_length": 16, "loss_type": ["ipo"]}),
    ("RewardTrainer", "Reward", {"chosen": 1, "rejected": 2}, {"max_length": 16}),
    ("KTOTrainer", "KTO", {"prompt": 0, "completion": 1}, {"max_length": 16}),
    ("GRPOTrainer", "GRPO", {"prompt": 0}, {"max_completion_length": 5, "num_generations": 2}),
):  # fmt: skip
    program("trl", _title)(tuned(_kind, _columns, **_options))
program("trl", "SFTTrainer, bf16", "bf16")(tuned("SFT", {"text": 0}, max_length=16, bf16=True))
program("trl", "DPOTrainer, bf16", "bf16")(tuned("DPO", _PAIRS, max_length=16, bf16=True))


# --- sentence-transformers
def sentence_model(compiled: Compile) -> Any:
    import sentence_transformers
    import transformers
    from sentence_transformers import models

    class Tower(nn.Module):
        """Tokens to embeddings, by a BERT."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            config = transformers.BertConfig(**MODELS["bert"][2])
            self.bert, self.tokenizer = compiled(transformers.BertModel(config)), tokenizer()

        def tokenize(self, texts: list[str], **_: Any) -> dict:
            return dict(self.tokenizer(texts, padding=True, return_tensors="pt"))

        preprocess = tokenize

        def forward(self, features: dict) -> dict:
            outputs = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            return features | {"token_embeddings": outputs.last_hidden_state}

    return sentence_transformers.SentenceTransformer(modules=[Tower(), models.Pooling(32)], device="cpu")


def embedded(loss: Callable[[Any, Any], Any], columns: int, labels: list[float] | None = None) -> Run:
    """loss: made from the module of losses and the model."""

    def run(compiled: Compile) -> Any:
        from sentence_transformers import losses

        model = sentence_model(compiled)
        loss_of, optimizer = loss(losses, model), torch.optim.AdamW(model.parameters(), lr=1e-3)
        model.train()
        results = []
        for seed in range(3):
            texts = [model.tokenize(sentences(seed + 10 * column)) for column in range(columns)]
            value = loss_of(texts, None if labels is None else torch.tensor(labels))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            results.append(value.item())
        model.eval()
        return results, model.encode(sentences(5), convert_to_tensor=True), weights(model)

    return run


_HALVES = [0.1, 0.9, 0.4, 0.7, 0.2, 0.8, 0.5, 0.6]
for _title, _loss, _columns, _labels in (
    ("contrastive pairs", lambda l, m: l.MultipleNegativesRankingLoss(m), 2, None),
    ("pairs, gradients cached", lambda l, m: l.CachedMultipleNegativesRankingLoss(m, mini_batch_size=4), 2, None),
    ("nested sizes", lambda l, m: l.MatryoshkaLoss(m, l.MultipleNegativesRankingLoss(m), [32, 16, 8]), 2, None),
    ("triplets", lambda l, m: l.TripletLoss(m), 3, None),
    ("similarities", lambda l, m: l.CosineSimilarityLoss(m), 2, _HALVES),
    ("ordered similarities", lambda l, m: l.CoSENTLoss(m), 2, _HALVES),
):
    program("sentence_transformers", _title)(embedded(_loss, _columns, _labels))
