"""Libraries that train and serve models, with compiled modules in the place of the models: results are eager's.

    python benchmarks/integrations.py [NAME ...] [--json FILE]

needs `pip install thunder-compiler[integrations]`. Each program trains or runs a small model twice, as it is and under
`thunder.jit(model, fallback="error")`, and gives losses, weights and results. One line a program:

    equal     whether every tensor and number is eager's: the norm of the largest difference over eager's norm <= 1e-6
    programs  how many programs were compiled
    dtypes    of tensors that these programs compute: they show that mixed precision is on

Exit status 1 where one differs, or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import thunder
from thunder.errors import FallbackWarning

BOUND = 1e-6  # norm-relative, float32
Compile = Callable[[nn.Module], nn.Module]
PROGRAMS: dict[str, tuple[str, Callable[[Compile], Any]]] = {}


def program(library: str, name: str = "") -> Callable:
    """Enters a program under a name. library: what it imports."""

    def enter(run: Callable[[Compile], Any]) -> Callable:
        PROGRAMS[f"{library}: {name or run.__name__.replace('_', ' ')}"] = library, run
        return run

    return enter


# --- models and data
def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 8, generator=drawn), torch.randint(0, 4, (6,), generator=drawn)) for _ in range(count)]


def tokens(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, columns), generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): t.detach().clone() for name, t in model.state_dict().items()}


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
QUIET = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | ENDS | QUIET),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"num_key_value_heads": 2} | ENDS),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"num_key_value_heads": 2, "head_dim": 8} | ENDS),
    "bert": ("BertForSequenceClassification", "BertConfig",
             SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0}),
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    import transformers

    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**options))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable, data: list) -> list[float]:
    """Losses of plain steps."""
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def classified(model: nn.Module, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


# --- transformers.Trainer, generate, pipelines
def trainer(name: str, **settings: Any) -> Callable[[Compile], Any]:
    def run(compiled: Compile) -> Any:
        import transformers

        rows = tokens(16, 12)
        labels = rows[:, 0] % 3 if name == "bert" else rows
        data = [{"input_ids": t, "labels": y, "unused": 1} for t, y in zip(rows, labels, strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = {
                "max_steps": 4, "per_device_train_batch_size": 4, "report_to": [], "logging_steps": 1, "use_cpu": True,
                "seed": 0, "disable_tqdm": True,
            }  # fmt: skip
            resumes = settings.get("save_steps")
            make = lambda: transformers.Trainer(
                model=compiled(model_of(name)),
                args=transformers.TrainingArguments(folder, **arguments | settings),
                train_dataset=data,
                eval_dataset=data[:4],
            )
            made = make()
            made.train()
            if resumes:
                made = make()
                made.train(resume_from_checkpoint=f"{folder}/checkpoint-{resumes}")
            made.save_model(f"{folder}/saved")
            again = type(model_of(name)).from_pretrained(f"{folder}/saved")
            losses = [h["loss"] for h in made.state.log_history if "loss" in h]
            return losses, made.evaluate()["eval_loss"], weights(made.model), weights(again)

    return run


for _name in MODELS:
    program("transformers", f"Trainer, {_name}")(trainer(_name))
for _title, _settings in {
    "bf16": {"bf16": True},
    "bf16, compiled evaluation": {"bf16": True, "bf16_full_eval": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "cosine schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1},
    "adafactor": {"optim": "adafactor"},
    "resumed from a checkpoint": {"save_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
}.items():
    program("transformers", f"Trainer, {_title}")(trainer("gpt2", **_settings))


def generated(name: str, **options: Any) -> Callable[[Compile], Any]:
    def run(compiled: Compile) -> Any:
        import transformers

        model = compiled(model_of(name).eval())
        if options.pop("assisted", False):
            options["assistant_model"] = model_of(name).eval()
        transformers.set_seed(3)
        return model.generate(tokens(2, 7), max_new_tokens=12, **{"do_sample": False} | options)

    return run


for _title, _name, _options in (
    ("greedy", "llama", {}),
    ("sampling", "llama", {"do_sample": True, "top_k": 20}),
    ("beams", "gpt2", {"num_beams": 3}),
    ("static cache", "llama", {"cache_implementation": "static"}),
    ("encoder and decoder", "t5", {}),
):
    program("transformers", f"generate, {_title}")(generated(_name, **_options))


# --- accelerate
def accelerated(steps: int = 1, clip: float = 0.0, scheduled: bool = False, **settings: Any):
    def run(compiled: Compile) -> Any:
        import accelerate
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps, **settings)
        model = compiled(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if scheduled else None
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        losses = []
        for batch in batches():
            with accelerator.accumulate(model):
                loss = classified(model, batch)
                accelerator.backward(loss)
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
        return losses, weights(accelerator.unwrap_model(model))

    return run


for _title, _settings in {
    "plain": {}, "bf16": {"mixed_precision": "bf16"}, "accumulation": {"steps": 2}, "clipping": {"clip": 0.1},
    "schedule, bf16": {"scheduled": True, "mixed_precision": "bf16"},
}.items():  # fmt: skip
    program("accelerate", _title)(accelerated(**_settings))


# --- Lightning and Fabric
def lightning_fit(inside: bool, manual: bool = False, **settings: Any):
    def run(compiled: Compile) -> Any:
        import lightning

        class Classifier(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net, self.automatic_optimization = mlp(), not manual

            def forward(self, x):
                return self.net(x)

            def training_step(self, batch, index):
                loss = F.cross_entropy(self(batch[0]), batch[1])
                self.log("loss", loss)
                if manual:
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
                return loss

            def validation_step(self, batch, index):
                self.log("validation", F.cross_entropy(self(batch[0]), batch[1]))

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)

        model = Classifier()
        if inside:
            model.net = compiled(model.net)
        given = {
            "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False,
        }  # fmt: skip
        made = lightning.Trainer(**given | settings)
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)
        made.fit(model if inside else compiled(model), loader, loader)
        return weights(model), {name: float(value) for name, value in made.callback_metrics.items()}

    return run


program("lightning", "a compiled net inside")(lightning_fit(True))
program("lightning", "a compiled LightningModule")(lightning_fit(False))
program("lightning", "bf16")(lightning_fit(False, precision="bf16-mixed"))
program("lightning", "accumulation and clipping")(
    lightning_fit(False, accumulate_grad_batches=2, gradient_clip_val=0.1)
)
program("lightning", "manual optimization")(lightning_fit(False, manual=True))


def fabric(first: bool, **settings: Any):
    def run(compiled: Compile) -> Any:
        import lightning

        made = lightning.Fabric(accelerator="cpu", devices=1, **settings)
        made.launch()
        model = compiled(mlp()) if first else mlp()
        model, optimizer = made.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        model = model if first else compiled(model)
        losses = []
        for batch in batches():
            loss = classified(model, batch)
            optimizer.zero_grad()
            made.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    return run


for _first, _order in ((True, "compiled, then set up"), (False, "set up, then compiled")):
    program("lightning", f"Fabric, {_order}")(fabric(_first))
    program("lightning", f"Fabric, bf16, {_order}")(fabric(_first, precision="bf16-mixed"))


# --- peft
def adapted(config: str, merged: bool = False, **options: Any):
    def run(compiled: Compile) -> Any:
        import peft

        torch.manual_seed(1)
        model = compiled(peft.get_peft_model(model_of("llama"), getattr(peft, config)(**options)))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        losses = trained(model, optimizer, language_loss, [tokens(2, 9), tokens(2, 9), tokens(2, 9)])
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = peft.PeftModel.from_pretrained(model_of("llama"), folder)
        if merged:
            model = compiled(model.merge_and_unload())
        with torch.no_grad():
            return losses, again(input_ids=tokens(2, 9)).logits, model(input_ids=tokens(2, 9)).logits

    return run


_LINEAR = {"target_modules": ["q_proj", "v_proj"]}
for _title, _config, _options in (
    ("LoRA", "LoraConfig", _LINEAR | {"r": 4}),
    ("LoRA, merged", "LoraConfig", _LINEAR | {"r": 4, "merged": True}),
    ("rank-stabilized LoRA", "LoraConfig", _LINEAR | {"r": 4, "use_rslora": True}),
    ("DoRA", "LoraConfig", _LINEAR | {"r": 4, "use_dora": True}),
    ("LoHa", "LoHaConfig", _LINEAR | {"r": 4}),
    ("LoKr", "LoKrConfig", _LINEAR | {"r": 4}),
    ("VeRA", "VeraConfig", {"target_modules": ["q_proj"], "r": 4}),
    ("IA3", "IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("prompt tuning", "PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
    ("prefix tuning", "PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
):
    program("peft", _title)(adapted(_config, **_options))


# --- vision and diffusion
# --- trl, sentence-transformers
def tokenizer():
    import tokenizers
    import transformers

    vocabulary = {f"w{i}": i for i in range(97)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


def sentences(seed: int, rows: int = 8) -> list[str]:
    drawn = torch.randint(3, 97, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{i}" for i in row) for row in drawn.tolist()]


def tuned(kind: str, columns: dict[str, int], name: str = "llama", **settings: Any) -> Callable[[Compile], Any]:
    """A trainer of TRL's. columns: the seeds of the texts in each column."""

    def run(compiled: Compile) -> Any:
        import datasets
        import trl

        data = datasets.Dataset.from_dict({column: sentences(seed) for column, seed in columns.items()})
        with tempfile.TemporaryDirectory() as folder:
            arguments = getattr(trl, f"{kind}Config")(
                folder, max_steps=3, per_device_train_batch_size=4, report_to=[], logging_steps=1, use_cpu=True, seed=0,
                disable_tqdm=True, bf16=False, gradient_checkpointing=False, **settings,
            )  # fmt: skip
            reference = {"ref_model": model_of(name)} if kind == "DPO" else {}
            made = getattr(trl, f"{kind}Trainer")(
                model=compiled(model_of(name)), args=arguments, train_dataset=data, processing_class=tokenizer(),
                **reference,
            )  # fmt: skip
            made.train()
            return [h["loss"] for h in made.state.log_history if "loss" in h], weights(made.model)

    return run


program("trl", "SFTTrainer")(tuned("SFT", {"text": 0}, max_length=16))
program("trl", "SFTTrainer, packed")(tuned("SFT", {"text": 0}, "gpt2", max_length=16, packing=True))
program("trl", "DPOTrainer")(tuned("DPO", {"prompt": 0, "chosen": 1, "rejected": 2}, max_length=16))


@program("sentence_transformers")
def contrastive_pairs(compiled: Compile) -> Any:
    import sentence_transformers
    import transformers
    from sentence_transformers import losses, models

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
            found = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            return features | {"token_embeddings": found.last_hidden_state}

    model = sentence_transformers.SentenceTransformer(modules=[Tower(), models.Pooling(32)], device="cpu")
    loss_of, optimizer = losses.MultipleNegativesRankingLoss(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    found = []
    for seed in range(3):
        pairs = [model.tokenize(sentences(seed)), model.tokenize(sentences(seed + 10))]
        loss = loss_of(pairs, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    model.eval()
    return found, model.encode(sentences(5), convert_to_tensor=True), weights(model)


def vision(name: str, size: int = 32):
    def run(compiled: Compile) -> Any:
        import timm

        torch.manual_seed(0)
        options = {"img_size": size} if re.match("vit|swin|mixer|deit", name) else {}
        model = compiled(timm.create_model(name, num_classes=5, **options))
        drawn = torch.Generator().manual_seed(0)
        data = [(torch.randn(2, 3, size, size, generator=drawn), torch.tensor([1, 2])) for _ in range(2)]
        torch.manual_seed(3)
        return trained(model, torch.optim.SGD(model.parameters(), 0.01), classified, data), weights(model)

    return run


for _name in ("resnet10t", "efficientnet_b0", "convnext_atto", "mobilenetv3_small_050", "mixer_s32_224", "regnetx_002",
              "densenet121", "vit_tiny_patch16_224"):  # fmt: skip
    program("timm", _name)(vision(_name))
program("timm", "swin_tiny_patch4_window7_224")(vision("swin_tiny_patch4_window7_224", 56))


def diffusion(kind: str, **options: Any):
    def run(compiled: Compile) -> Any:
        import diffusers

        torch.manual_seed(0)
        model = compiled(getattr(diffusers, kind)(**options))
        schedule = diffusers.DDPMScheduler(num_train_timesteps=10)
        drawn = torch.Generator().manual_seed(0)
        more = {"class_labels": torch.tensor([1, 2])} if kind == "DiTTransformer2DModel" else {}

        def loss_of(model, noise):
            step = torch.tensor([3, 7])
            noisy = schedule.add_noise(torch.ones_like(noise), noise, step)
            return F.mse_loss(model(noisy, step, **more).sample[:, : noise.shape[1]], noise)

        data = [torch.randn(2, 4, 16, 16, generator=drawn) for _ in range(2)]
        losses = trained(model, torch.optim.AdamW(model.parameters(), 1e-4), loss_of, data)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return losses, weights(getattr(diffusers, kind).from_pretrained(folder))

    return run


program("diffusers", "UNet2DModel")(
    diffusion("UNet2DModel", sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 32),
              down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
)  # fmt: skip
program("diffusers", "DiTTransformer2DModel")(
    diffusion("DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2,
              sample_size=16, norm_num_groups=1)
)  # fmt: skip


# --- PyTorch's own tools
@program("torchmetrics")
def accuracy_over_a_loader_with_workers(compiled: Compile) -> Any:
    import torchmetrics

    model, metric = compiled(mlp()), torchmetrics.Accuracy("multiclass", num_classes=4)
    data = torch.utils.data.TensorDataset(*(torch.cat(column) for column in zip(*batches(), strict=True)))
    for x, y in torch.utils.data.DataLoader(data, 6, num_workers=1):
        metric.update(model(x).detach(), y)
    return float(metric.compute())


@program("torch")
def save_load_and_copy(compiled: Compile) -> Any:
    model, x = compiled(mlp()), batches()[0][0]
    model(x)
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    again, other = torch.load(kept, weights_only=False), compiled(mlp())
    other.load_state_dict(model.state_dict())
    return again(x).detach(), other(x).detach(), copy.deepcopy(model)(x).detach()


@program("torch")
def averaged_weights(compiled: Compile) -> Any:
    model = compiled(mlp())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches():
        trained(model, optimizer, classified, [batch])
        averaged.update_parameters(model)
    return averaged(batches()[0][0]).detach()


@program("torch")
def gradient_scaler(compiled: Compile) -> Any:
    model, scaler = compiled(mlp()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = classified(model, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, weights(model)


@program("torch")
def line_search(compiled: Compile) -> Any:
    model, batch = compiled(mlp()), batches()[0]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = classified(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure).item(), weights(model)


@program("torch")
def data_parallel_over_one_process(compiled: Compile) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = torch.nn.parallel.DistributedDataParallel(compiled(mlp()))
            return trained(model, torch.optim.SGD(model.parameters(), 0.1), classified, batches())
        finally:
            torch.distributed.destroy_process_group()


# --- comparison
def difference(ours: Any, expected: Any) -> float:
    """The largest norm-relative difference of tensors and numbers; infinite where structures differ."""
    a, b = (
        [torch.as_tensor(x).detach().double() for x in tree_leaves(r) if isinstance(x, (torch.Tensor, int, float))]
        for r in (ours, expected)
    )
    if [x.shape for x in a] != [x.shape for x in b]:
        return float("inf")
    return max((((x - y).norm() / y.norm().clamp(min=1e-30)).item() for x, y in zip(a, b, strict=True)), default=0.0)


def compare(run: Callable[[Compile], Any]) -> dict[str, Any]:
    made: list = []

    def compiled(model: nn.Module) -> nn.Module:
        made.append(thunder.jit(model, fallback="error"))
        return made[-1]

    expected = run(lambda model: model)
    try:
        ours = run(compiled)
    except Exception as error:  # noqa: BLE001  shown in the table
        return {"equal": False, "failed": f"{type(error).__name__}: {error}"[:300]}
    programs = [p for m in made for p in m.programs]
    found = {t for p in programs for t in re.findall(r'"cpu (bf16|f16|f32|f64)\[', str(p.forward))}
    far = difference(ours, expected)
    return {"equal": far <= BOUND, "difference": far, "programs": len(programs), "dtypes": sorted(found)}


@contextlib.contextmanager
def quiet():
    """Without the warnings of the libraries. Where the original runs, that is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FallbackWarning)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of programs; all of them otherwise")
    parser.add_argument("--json", help="a file to which a line is added for each program")
    chosen = parser.parse_args()
    failed = 0
    for name, (library, run) in PROGRAMS.items():
        if chosen.names and not any(part in name for part in chosen.names):
            continue
        if importlib.util.find_spec(library) is None:
            print(f"{name:50} not run: {library} is not installed", flush=True)
            continue
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()), quiet():
            row = compare(run)
        failed += not row["equal"]
        words = row.get("failed") or "{difference:.1e}  programs {programs}  {dtypes}".format_map(row)
        print(f"{name:50} {'equal  ' if row['equal'] else 'DIFFERS'}  {words}", flush=True)
        if chosen.json:
            with open(chosen.json, "a") as file:
                file.write(json.dumps({"program": name, **row}) + "\n")
    print(f"{len(PROGRAMS)} programs, {failed} differ or fail")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
