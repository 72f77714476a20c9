"""Training loops of accelerate, Lightning and Fabric."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .common import Compile, Run, batches, classified, mlp, program, weights


def loader(batch_size: int = 6) -> torch.utils.data.DataLoader:
    columns = (torch.cat(column) for column in zip(*batches(), strict=True))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*columns), batch_size)


# --- accelerate
def accelerated(
    steps: int = 1, clip: float = 0.0, scheduled: bool = False, compiled_last: bool = False, **settings: Any
) -> Run:
    def run(compiled: Compile) -> Any:
        import accelerate
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps, **settings)
        model = mlp() if compiled_last else compiled(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if scheduled else None
        model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, loader())
        trains = compiled(model) if compiled_last else model
        losses = []
        for batch in data:
            with accelerator.accumulate(model), accelerator.autocast():
                loss = classified(trains, batch)
                accelerator.backward(loss)
                if clip:
                    losses.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        trains.eval()
        with torch.no_grad():
            gathered = [accelerator.gather_for_metrics((trains(x).argmax(-1), y)) for x, y in data]
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
            accelerator.save_model(accelerator.unwrap_model(model), f"{folder}/model")
            again = mlp()
            accelerate.load_checkpoint_in_model(again, f"{folder}/model")
        return losses, gathered, weights(accelerator.unwrap_model(model)), weights(again)

    return run


for _title, _dtype, _settings in (
    ("plain", "f32", {}),
    ("bf16", "bf16", {"mixed_precision": "bf16"}),
    ("accumulation", "f32", {"steps": 2}),
    ("bf16, accumulation and clipping", "bf16", {"steps": 2, "mixed_precision": "bf16", "clip": 0.1}),
    ("clipping", "f32", {"clip": 0.1}),
    ("schedule, bf16", "bf16", {"scheduled": True, "mixed_precision": "bf16"}),
    ("prepared, then compiled", "f32", {"compiled_last": True}),
    ("prepared, then compiled, bf16", "bf16", {"compiled_last": True, "mixed_precision": "bf16"}),
):
    program("accelerate", _title, _dtype)(accelerated(**_settings))


@program("accelerate", "two models, two optimizers")
def adversaries(compiled: Compile) -> Any:
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    maker, judge = compiled(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))), compiled(mlp())
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (maker, judge)]
    maker, judge, *optimizers = accelerator.prepare(maker, judge, *optimizers)
    losses = []
    for x, _ in batches():
        outputs = maker(torch.linspace(-1, 1, 18).view(6, 3))
        judged = F.softplus(judge(outputs.detach())).mean() + F.softplus(-judge(x)).mean()
        optimizers[1].zero_grad()
        accelerator.backward(judged)
        optimizers[1].step()
        fooled = F.softplus(-judge(outputs)).mean()
        optimizers[0].zero_grad()
        accelerator.backward(fooled)
        optimizers[0].step()
        losses += [judged.item(), fooled.item()]
    return losses, weights(maker), weights(judge)


# --- Lightning
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def classifier(manual: bool = False, plateau: bool = False) -> Any:
    """A LightningModule with what its users write."""
    import lightning
    import torchmetrics

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = mlp(), not manual
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
            self.save_hyperparameters()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
            return {"loss": loss, "index": index}

        def validation_step(self, batch, index):
            scores = self(batch[0])
            self.accuracy(scores, batch[1])
            self.log("accuracy", self.accuracy, on_epoch=True)
            self.log_dict({"validation": F.cross_entropy(scores, batch[1])})

        def test_step(self, batch, index):
            self.log("test", F.cross_entropy(self(batch[0]), batch[1]))

        def predict_step(self, batch, index):
            return self(batch[0]).softmax(-1)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)
            if not plateau:
                return optimizer
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validation"}}

    return Classifier()


def lightning_fit(inside: bool = False, callbacks: tuple = (), **settings: Any) -> Run:
    """callbacks: names of classes and their arguments."""

    def run(compiled: Compile) -> Any:
        import lightning

        kinds = {name: settings.pop(name) for name in ("manual", "plateau") if name in settings}
        model = classifier(**kinds)
        settings.update(kinds)
        if inside:
            model.net = compiled(model.net)
        trains = model if inside else compiled(model)
        added = [getattr(lightning.pytorch.callbacks, name)(**options) for name, options in callbacks]
        others = {k: v for k, v in settings.items() if k not in kinds}
        trainer = lightning.Trainer(**QUIET | {"max_epochs": 2, "callbacks": added} | others)
        trainer.fit(trains, loader(), loader())
        results = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return weights(model), results, trainer.test(trains, loader(), verbose=False), trainer.predict(trains, loader())

    return run


for _title, _settings in {
    "a compiled net inside": {"inside": True},
    "a compiled LightningModule": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "manual optimization": {"manual": True},
    "a plateau schedule": {"plateau": True, "max_epochs": 3},
    "anomaly detection, a profiler": {"detect_anomaly": True, "profiler": "simple"},
    "early stopping": {"max_epochs": 3, "callbacks": (("EarlyStopping", {"monitor": "validation", "patience": 1}),)},
    "stochastic weight averaging": {
        "max_epochs": 3, "callbacks": (("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 1}),),
    },
    "EMA of weights": {"callbacks": (("EMAWeightAveraging", {"decay": 0.5}),)},
    "accumulation that is scheduled": {"callbacks": (("GradientAccumulationScheduler", {"scheduling": {0: 1, 1: 2}}),)},
    "float64": {"precision": "64-true"},
}.items():  # fmt: skip
    program("lightning", _title, "f64" if _title == "float64" else "f32")(lightning_fit(**_settings))
program("lightning", "bf16", "bf16")(lightning_fit(precision="bf16-mixed"))
program("lightning", "bf16, a compiled net inside", "bf16")(lightning_fit(True, precision="bf16-mixed"))
program("lightning", "weights in bf16", "bf16")(lightning_fit(precision="bf16-true"))


@program("lightning", "checkpoints, resumed; the plain class loads them")
def lightning_checkpoints(compiled: Compile) -> Any:
    import lightning

    with tempfile.TemporaryDirectory() as folder:
        batches, checkpoints = [], lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
        for epochs in (1, 2):
            trainer = lightning.Trainer(
                **QUIET | {"enable_checkpointing": True}, max_epochs=epochs, callbacks=[checkpoints]
            )
            model = classifier()
            path = f"{folder}/last.ckpt" if epochs == 2 else None
            trainer.fit(compiled(model), loader(), loader(), ckpt_path=path, weights_only=False)
            batches.append(weights(model))
        loaded = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]
        plain = type(model).load_from_checkpoint(f"{folder}/last.ckpt", weights_only=False)
        return batches, list(loaded.values()), len(loaded.keys() - model.state_dict().keys()), weights(plain)


@program("lightning", "layers frozen, and thawed by a callback")
def thawed(compiled: Compile) -> Any:
    import lightning

    class Thaw(lightning.pytorch.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.01)

    model = classifier()
    trainer = lightning.Trainer(**QUIET, max_epochs=3, callbacks=[Thaw()])
    trainer.fit(compiled(model), loader(), loader())
    return weights(model), {name: float(value) for name, value in trainer.callback_metrics.items()}


@program("lightning", "two optimizers, toggled")
def toggled(compiled: Compile) -> Any:
    import lightning

    class Pair(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.maker, self.judge = compiled(nn.Linear(3, 8)), compiled(mlp())
            self.automatic_optimization = False

        def training_step(self, batch, index):
            outputs, (first, second) = self.maker(torch.ones(6, 3)), self.optimizers()
            for optimizer, sign in ((first, 1), (second, -1)):
                self.toggle_optimizer(optimizer)
                loss = (sign * self.judge(outputs if sign > 0 else outputs.detach())).logsumexp(0).sum()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                self.log(f"loss {sign}", loss)

        def configure_optimizers(self):
            return torch.optim.SGD(self.maker.parameters(), 0.1), torch.optim.Adam(self.judge.parameters(), 0.01)

    model = Pair()
    trainer = lightning.Trainer(**QUIET, max_epochs=2)
    trainer.fit(model, loader())
    return weights(model), {name: float(value) for name, value in trainer.callback_metrics.items()}


@program("lightning", "configure_model compiles")
def configured(compiled: Compile) -> Any:
    import lightning

    class Late(lightning.LightningModule):
        def configure_model(self):
            if not hasattr(self, "net"):
                self.net = compiled(mlp())

        def training_step(self, batch, index):
            return classified(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Late()
    lightning.Trainer(**QUIET, max_epochs=2).fit(model, loader())
    return weights(model)


# --- Fabric
def fabric(first: bool, steps: int = 1, **settings: Any) -> Run:
    def run(compiled: Compile) -> Any:
        import lightning

        runner = lightning.Fabric(accelerator="cpu", devices=1, **settings)
        runner.launch()
        plain = mlp()
        model = compiled(plain) if first else plain
        model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        model = model if first else compiled(model)
        losses = []
        for index, batch in enumerate(runner.setup_dataloaders(loader())):
            is_last = (index + 1) % steps == 0
            loss = classified(model, batch) / steps
            runner.backward(loss)
            losses.append(loss.item())
            if is_last:
                runner.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            runner.save(f"{folder}/state", {"model": model, "optimizer": optimizer, "step": 3})
            again = mlp()
            runner.load(f"{folder}/state", {"model": again})
        return losses, weights(plain), weights(again)

    return run


for _first, _order in ((True, "compiled, then set up"), (False, "set up, then compiled")):
    program("lightning", f"Fabric, {_order}")(fabric(_first))
    program("lightning", f"Fabric, accumulation, {_order}")(fabric(_first, steps=2))
    program("lightning", f"Fabric, bf16, {_order}", "bf16")(fabric(_first, precision="bf16-mixed"))
    program("lightning", f"Fabric, weights in bf16, {_order}", "bf16")(fabric(_first, precision="bf16-true"))
