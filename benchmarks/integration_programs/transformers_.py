"""transformers: trainers, generation, pipelines."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .common import MODELS, Compile, Run, model_of, program, sentences, tokenizer, tokens, weights

LANGUAGE = ("gpt2", "llama", "qwen3", "t5", "mixtral")


def rows_for(name: str, count: int = 16) -> list[dict[str, Any]]:
    """Examples of a data set, with a column that the model does not take."""
    drawn = tokens(count, 12)
    if name == "vit":
        images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(2))
        return [{"pixel_values": x, "labels": y} for x, y in zip(images, drawn[:, 0] % 3, strict=True)]
    labels = drawn if name in LANGUAGE else drawn[:, 0] % 3
    return [{"input_ids": x, "labels": y, "unused": 1} for x, y in zip(drawn, labels, strict=True)]


def arguments_of(folder: str, kind: str = "TrainingArguments", **settings: Any) -> Any:
    import transformers

    defaults = {
        "max_steps": 4, "per_device_train_batch_size": 4, "report_to": [], "logging_steps": 1, "use_cpu": True,
        "seed": 0, "disable_tqdm": True,
    }  # fmt: skip
    return getattr(transformers, kind)(folder, **defaults | settings)


def numbers(history: list[dict]) -> list[float]:
    """Losses, gradients' norms and metrics of a trainer's history, without times."""
    return [v for row in history for k, v in row.items() if "loss" in k or "grad_norm" in k or "accuracy" in k]


# --- Trainer
def trainer(name: str, config: dict | None = None, **settings: Any) -> Run:
    def run(compiled: Compile) -> Any:
        import transformers

        data = rows_for(name)
        with tempfile.TemporaryDirectory() as folder:
            resumes = settings.get("save_steps")
            make = lambda: transformers.Trainer(
                model=compiled(model_of(name, **config or {})),
                args=arguments_of(folder, **settings),
                train_dataset=data,
                eval_dataset=data[:4],
            )
            loop = make()
            loop.train()
            if resumes:
                loop = make()
                loop.train(resume_from_checkpoint=f"{folder}/checkpoint-{resumes}")
            loop.save_model(f"{folder}/saved")
            again = type(model_of(name)).from_pretrained(f"{folder}/saved")
            return numbers(loop.state.log_history), loop.evaluate()["eval_loss"], weights(loop.model), weights(again)

    return run


for _name in MODELS:
    program("transformers", f"Trainer, {_name}")(trainer(_name))
for _title, _settings in {
    "compiled evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "reentrant gradient checkpointing": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "cosine schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1},
    "adafactor": {"optim": "adafactor"},
    "fused AdamW": {"optim": "adamw_torch_fused"},
    "resumed from a checkpoint": {"save_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "noisy embeddings": {"neftune_noise_alpha": 5.0},
    "dropout": {"config": {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}},
    "dropout and gradient checkpointing": {"config": {"resid_pdrop": 0.1}, "gradient_checkpointing": True},
    "eager attention": {"config": {"attn_implementation": "eager"}},
    "untied embeddings": {"config": {"tie_word_embeddings": False}},
}.items():  # fmt: skip
    program("transformers", f"Trainer, {_title}")(trainer("gpt2", **_settings))
for _title, _settings in {
    "bf16": {"bf16": True},
    "bf16, compiled evaluation": {"bf16": True, "bf16_full_eval": True},
    "bf16, accumulation and clipping": {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "bf16, gradient checkpointing": {"bf16": True, "gradient_checkpointing": True},
}.items():
    program("transformers", f"Trainer, {_title}", "bf16")(trainer("gpt2", **_settings))


@program("transformers", "Trainer, metrics, early stopping, the best checkpoint")
def trainer_with_metrics(compiled: Compile) -> Any:
    import transformers

    data = rows_for("bert")
    with tempfile.TemporaryDirectory() as folder:
        run = transformers.Trainer(
            model=compiled(model_of("bert")),
            args=arguments_of(
                folder, max_steps=8, eval_strategy="steps", save_strategy="steps", eval_steps=2, save_steps=2,
                load_best_model_at_end=True, metric_for_best_model="accuracy", learning_rate=1e-3,
            ),
            train_dataset=data,
            eval_dataset=data[:6],
            compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean().item()},
            callbacks=[transformers.EarlyStoppingCallback(2)],
        )  # fmt: skip
        run.train()
        predicted = run.predict(data[:5])
        return numbers(run.state.log_history), weights(run.model), torch.tensor(predicted.predictions)


@program("transformers", "Trainer, a loss and an optimizer of one's own, frozen layers")
def trainer_subclass(compiled: Compile) -> Any:
    import transformers

    class Weighted(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 0.5]))
            return (loss, outputs) if return_outputs else loss

    model = model_of("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "classifier" in name or "layer.1" in name
    model = compiled(model)
    data = rows_for("bert")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with tempfile.TemporaryDirectory() as folder:
        run = Weighted(
            model, arguments_of(folder), train_dataset=data, eval_dataset=data[:4], optimizers=(optimizer, schedule)
        )
        run.train()
        return numbers(run.state.log_history), run.evaluate()["eval_loss"], weights(run.model)


@program("transformers", "Trainer, masked language model, padded to lengths that vary")
def trainer_of_lengths(compiled: Compile) -> Any:
    import transformers

    config = transformers.BertConfig(**MODELS["bert"][2])
    torch.manual_seed(0)
    words = tokenizer()
    words.add_special_tokens({"mask_token": "w4"})
    data = [{"input_ids": row[: 4 + i % 7].tolist()} for i, row in enumerate(tokens(16, 12))]
    with tempfile.TemporaryDirectory() as folder:
        run = transformers.Trainer(
            compiled(transformers.BertForMaskedLM(config)),
            arguments_of(folder, train_sampling_strategy="group_by_length"),
            data_collator=transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.4),
            train_dataset=data,
        )
        run.train()
        return numbers(run.state.log_history), weights(run.model)


@program("transformers", "Seq2SeqTrainer, evaluated by generating")
def sequence_trainer(compiled: Compile) -> Any:
    import transformers

    data = rows_for("t5")
    with tempfile.TemporaryDirectory() as folder:
        run = transformers.Seq2SeqTrainer(
            compiled(model_of("t5")),
            arguments_of(folder, "Seq2SeqTrainingArguments", predict_with_generate=True, generation_max_length=6),
            train_dataset=data,
            eval_dataset=data[:4],
            processing_class=tokenizer(),
            compute_metrics=lambda p: {"accuracy": float(p.predictions.sum())},
        )
        run.train()
        return numbers(run.state.log_history), run.evaluate()["eval_accuracy"], weights(run.model)


# --- models of other kinds in a plain loop
def heads(kind: str, config: str, inputs: dict[str, Any], **options: Any) -> Run:
    """Three steps of a model with a loss of its own."""

    def run(compiled: Compile) -> Any:
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**options))
        model = compiled(model.train())
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
        for _ in range(3):
            loss = model(**inputs).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            losses += [loss.item(), norm.item()]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return losses, weights(getattr(transformers, kind).from_pretrained(folder))

    return run


_SMALL_TEXT = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_TEXT = {"input_ids": tokens(3, 9), "attention_mask": (tokens(3, 9) > 20).long()}
program("transformers", "named entities")(
    heads("BertForTokenClassification", "BertConfig", _TEXT | {"labels": tokens(3, 9) % 3}, **_SMALL_TEXT, num_labels=3)
)
program("transformers", "question answering")(
    heads("RobertaForQuestionAnswering", "RobertaConfig",
          _TEXT | {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 5, 9])}, **_SMALL_TEXT)
)  # fmt: skip
program("transformers", "multiple choice")(
    heads("BertForMultipleChoice", "BertConfig",
          {"input_ids": tokens(6, 9).view(3, 2, 9), "labels": torch.tensor([0, 1, 1])}, **_SMALL_TEXT)
)  # fmt: skip
program("transformers", "several labels")(
    heads("ElectraForSequenceClassification", "ElectraConfig", _TEXT | {"labels": (tokens(3, 3) % 2).float()},
          **_SMALL_TEXT, embedding_size=32, num_labels=3, problem_type="multi_label_classification")
)  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
program("transformers", "CLIP")(
    heads("CLIPModel", "CLIPConfig",
          {"input_ids": tokens(3, 9), "pixel_values": torch.linspace(-1, 1, 3 * 3 * 16 * 16).view(3, 3, 16, 16),
           "return_loss": True},
          text_config=_TOWER | {"vocab_size": 97, "eos_token_id": 2},
          vision_config=_TOWER | {"image_size": 16, "patch_size": 8}, projection_dim=16)
)  # fmt: skip
program("transformers", "speech with CTC")(
    heads("Wav2Vec2ForCTC", "Wav2Vec2Config",
          {"input_values": torch.linspace(-1, 1, 2 * 800).sin().view(2, 800), "labels": tokens(2, 3) % 30},
          vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
          conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(8, 4), num_feat_extract_layers=2, layerdrop=0.0,
          num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, feat_proj_dropout=0.0,
          hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, final_dropout=0.0)
)  # fmt: skip


# --- generate, pipelines
def generated(name: str, assisted: bool = False, rows: int = 2, **options: Any) -> Run:
    def run(compiled: Compile) -> Any:
        import transformers

        model = compiled(model_of(name).eval())
        helper = {"assistant_model": model_of(name).eval()} if assisted else {}
        transformers.set_seed(3)
        results = model.generate(tokens(rows, 7), max_new_tokens=12, **{"do_sample": False} | options | helper)
        return dict(results) if options.get("return_dict_in_generate") else results

    return run


for _title, _name, _options in (
    ("greedy", "llama", {}),
    ("sampling", "llama", {"do_sample": True, "top_k": 20}),
    ("nucleus sampling with penalties", "gpt2",
     {"do_sample": True, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2}),
    ("beams", "gpt2", {"num_beams": 3}),
    ("sampled beams", "gpt2", {"num_beams": 3, "do_sample": True}),
    ("static cache", "llama", {"cache_implementation": "static"}),
    ("without a cache", "llama", {"use_cache": False}),
    ("encoder and decoder", "t5", {}),
    ("encoder and decoder, beams", "t5", {"num_beams": 2, "early_stopping": True}),
    ("with an assistant", "llama", {"assisted": True, "rows": 1}),
    ("scores", "llama", {"return_dict_in_generate": True, "output_scores": True}),
    ("prompt look-up", "gpt2", {"prompt_lookup_num_tokens": 3, "rows": 1}),
    ("experts", "mixtral", {}),
):  # fmt: skip
    program("transformers", f"generate, {_title}")(generated(_name, **_options))


@program("transformers", "generate, padded rows, stopping, streaming")
def padded_generation(compiled: Compile) -> Any:
    import transformers

    class Texts(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.values: list = []

        def put(self, value):
            self.values.append(value.clone())

        def end(self):
            pass

    model, prompt = compiled(model_of("llama").eval()), tokens(2, 7)
    prompt[0, :3] = 0
    stop = transformers.StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] == 5])
    rows = model.generate(prompt, attention_mask=(prompt != 0).long(), max_new_tokens=9, stopping_criteria=stop)
    streamer = Texts()
    model.generate(prompt[1:], max_new_tokens=5, do_sample=False, streamer=streamer)
    return rows, streamer.values


@program("transformers", "generate, turns of a conversation on one cache")
def conversation(compiled: Compile) -> Any:
    import transformers

    model, cache, history, results = compiled(model_of("qwen3").eval()), transformers.DynamicCache(), tokens(1, 4), []
    for _ in range(3):
        history = model.generate(history, past_key_values=cache, max_new_tokens=4, do_sample=False)
        results.append(history)
        history = torch.cat([history, tokens(1, 3)], -1)
    return results


@program("transformers", "pipelines")
def pipelines(compiled: Compile) -> Any:
    import transformers

    texts = [" ".join(row.split()[: 3 + i]) for i, row in enumerate(sentences(0, 4))]
    classify = transformers.pipeline(
        "text-classification", model=compiled(model_of("bert").eval()), tokenizer=tokenizer(), device="cpu"
    )
    write = transformers.pipeline(
        "text-generation", model=compiled(model_of("gpt2").eval()), tokenizer=tokenizer(), device="cpu"
    )
    classes = [(int(row["label"][-1]), row["score"]) for row in classify(texts, batch_size=2)]
    written = write(texts, max_new_tokens=5, do_sample=False, return_tensors=True, batch_size=2)
    return classes, [row[0]["generated_token_ids"] for row in written]


@program("transformers", "new words after compiling, tied weights")
def resized(compiled: Compile) -> Any:
    model = compiled(model_of("gpt2"))
    model(input_ids=tokens(2, 5), labels=tokens(2, 5)).loss.backward()
    model.resize_token_embeddings(101, mean_resizing=False)
    torch.nn.init.ones_(model.get_input_embeddings().weight.data[97:])
    model.zero_grad()
    outputs = model(input_ids=tokens(2, 5) + 4, labels=tokens(2, 5) + 4)
    outputs.loss.backward()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return outputs.loss.item(), outputs.logits.detach(), [p.grad for p in model.parameters()]


@program("transformers", "hidden states, attention maps, embeddings as inputs")
def looked_into(compiled: Compile) -> Any:
    model = compiled(model_of("llama", attn_implementation="eager").eval())
    embedded = model.get_input_embeddings()(tokens(2, 6))
    outputs = model(inputs_embeds=embedded, output_hidden_states=True, output_attentions=True, use_cache=False)
    tuples = model(input_ids=tokens(2, 6), return_dict=False)
    return (
        outputs.logits.detach(),
        [h.detach() for h in outputs.hidden_states],
        [a.detach() for a in outputs.attentions],
        tuples[0].detach(),
    )
