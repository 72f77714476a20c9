"""Parts that other libraries carry out."""

from __future__ import annotations

import io
import json

import numpy as np
import torch
from torch.nn import functional as F

from eager_call_programs.common import Model, program


@program("tqdm")
def tqdm_over_layers(folder):
    import tqdm

    out = io.StringIO()

    class Refines(Model):
        def odd(self, h):
            for k in tqdm.tqdm(range(3), file=out, desc="refine"):
                h = h + torch.sin(h) / (k + 1)
            return h

    return Refines(), lambda: out.getvalue().count("refine: 100%")


@program("tqdm")
def tqdm_disabled_inline(folder):
    from tqdm import tqdm

    class Refines(Model):
        def forward(self, x):
            h = self.first(x)
            for _ in tqdm([0.5, 0.25], disable=True):
                h = h * 0.5
            return self.last(h)

    return Refines()


@program("tqdm")
def tqdm_trange_in_with(folder):
    from tqdm import trange

    out = io.StringIO()

    def odd(h):
        with trange(2, file=out, leave=False) as bar:
            for k in bar:
                bar.set_postfix(step=k)
                h = h.tanh() * (k + 1)
        return h

    return Model(odd, dropout=0.2), lambda: "step=1" in out.getvalue()


@program("rich")
def rich_prints_a_number(folder):
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=60)

    class Prints(Model):
        def odd(self, h):
            console.print(f"[bold]mean[/bold] {h.mean().item():.3f}")
            return h * 2

    return Prints(norm=True), out.getvalue


@program("rich")
def rich_table_of_norms(folder):
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()

    def odd(h):
        table = Table("row", "norm")
        for i, norm in enumerate(h.norm(dim=1).tolist()):
            table.add_row(str(i), f"{norm:.4f}")
        Console(file=out, width=40).print(table)
        return h / h.norm(dim=1, keepdim=True)

    return Model(odd), out.getvalue


@program("rich")
def rich_track(folder):
    from rich.console import Console
    from rich.progress import track

    out = io.StringIO()
    console = Console(file=out, width=60)

    class Tracks(Model):
        def odd(self, h):
            total = torch.zeros_like(h)
            for k in track(range(3), console=console, description="blocks", disable=True):
                total = total + h * k
            return total

    return Tracks()


@program("networkx")
def networkx_shortest_paths(folder):
    import networkx as nx

    graph = nx.cycle_graph(6)
    graph.add_edge(0, 3)

    class Walks(Model):
        def odd(self, h):
            lengths = dict(nx.all_pairs_shortest_path_length(graph))
            weights = torch.tensor([float(lengths[0][k]) for k in range(6)])
            return h * weights.softmax(0).max()

    return Walks()


@program("networkx")
def networkx_graph_of_similarities(folder):
    import networkx as nx

    sizes = []

    def odd(h):
        near = (h.detach() @ h.detach().T) > 0
        graph = nx.from_numpy_array(near.numpy().astype(int))
        parts = list(nx.connected_components(graph))
        sizes.append(len(parts))
        return h * (1 + len(parts))

    return Model(odd), lambda: list(sizes)


@program("networkx")
def networkx_pagerank_as_weights(folder):
    import networkx as nx

    class Ranks(Model):
        def ranks(self, rows):
            graph = nx.DiGraph()
            graph.add_weighted_edges_from((i, (i + 1) % rows, 1.0 + i) for i in range(rows))
            flow, _ = nx.maximum_flow(graph, 0, rows - 1, capacity="weight")
            return float(flow)

        def odd(self, h):
            return h * self.ranks(h.shape[0])

    return Ranks(norm=True)


@program("pandas")
def pandas_groupby(folder):
    import pandas as pd

    def odd(h):
        frame = pd.DataFrame(h.detach().numpy()).assign(kind=[i % 2 for i in range(len(h))])
        means = torch.from_numpy(frame.groupby("kind").mean().to_numpy())
        return h - means[torch.arange(len(h)) % 2]

    return Model(odd)


@program("pandas")
def pandas_history_of_losses(folder):
    import pandas as pd

    class Records(Model):
        history = pd.DataFrame({"step": [], "mean": []})

        def odd(self, h):
            self.history.loc[len(self.history)] = [float(len(self.history)), h.mean().item()]
            return h + float(self.history["step"].iloc[-1])

    model = Records()
    return model, lambda: model.history.round(5).to_csv()


@program("pandas")
def pandas_csv_of_buckets(folder):
    import pandas as pd

    path = folder / "buckets.csv"
    path.touch()

    def odd(h):
        counts = pd.cut(pd.Series(h.detach().flatten().tolist()), bins=[-9, 0, 0.5, 9]).value_counts(sort=False)
        counts.to_csv(path, mode="a")
        return h * float(counts.iloc[0] + 1)

    return Model(odd, dropout=0.1), path.read_text


@program("scipy")
def scipy_assignment(folder):
    from scipy.optimize import linear_sum_assignment

    class Matches(Model):
        def odd(self, h):
            cost = torch.cdist(h, h.flip(0))
            rows, columns = linear_sum_assignment(cost.detach().numpy())
            return h + cost[rows, columns].sum()

    return Matches()


@program("scipy")
def scipy_quad_and_spline(folder):
    from scipy.integrate import quad
    from scipy.interpolate import CubicSpline

    def odd(h):
        area, _ = quad(lambda t: np.exp(-t * t), 0, float(h.detach().abs().max()))
        spline = CubicSpline([0.0, 1.0, 2.0], [0.0, area, 1.0])
        return h * float(spline(0.5))

    return Model(odd)


@program("scipy")
def scipy_sparse_product(folder):
    from scipy.sparse import csr_matrix

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, matrix):
            ctx.matrix = matrix
            return torch.from_numpy(matrix @ h.detach().numpy())

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(ctx.matrix.T @ g.numpy()), None

    def odd(h):
        return Product.apply(h, csr_matrix(np.tri(len(h), dtype=np.float32)))

    return Model(odd)


@program("tokenizers")
def tokenizers_word_level(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["low", "high", "mid", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    class Reads(Model):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 1)

        def odd(self, h):
            text = " ".join("high" if m > 0.2 else "low" for m in h.mean(1).tolist())
            return h + self.embedding(torch.tensor(tokenizer.encode(text).ids))

    return Reads()


@program("tokenizers")
def tokenizers_bpe_trained_inside(folder):
    from tokenizers import Tokenizer, models, trainers

    def odd(h):
        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=30, show_progress=False)
        tokenizer.train_from_iterator(["abab", "abba", "baab"], trainer)
        return h * len(tokenizer.encode("ababab").ids)

    return Model(odd)


@program("transformers")
def transformers_slow_tokenizer(folder):
    from transformers import BertTokenizer

    path = folder / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "up", "down", "##s"]))
    tokenizer = BertTokenizer(str(path))

    class Reads(Model):
        def odd(self, h):
            texts = ["ups" if m > 0.2 else "down down" for m in h.mean(1).tolist()]
            ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
            return h + ids.float().mean(1, keepdim=True)

    return Reads(norm=True)


@program("transformers")
def transformers_tokenizer_decodes(folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    texts = []

    def odd(h):
        texts.append(tokenizer.decode((h.detach().sum(1) > 0).long()))
        return h * len(texts)

    return Model(odd), lambda: list(texts)


@program("PIL")
def pillow_round_trip(folder):
    from PIL import Image

    def odd(h):
        values = (h.detach().clamp(0, 1) * 255).to(torch.uint8).numpy()
        out = io.BytesIO()
        Image.fromarray(values).save(out, format="png")
        image = np.asarray(Image.open(io.BytesIO(out.getvalue())))
        return h + torch.from_numpy(image.copy()).float() / 255

    return Model(odd)


@program("yaml")
def yaml_of_settings(folder):
    import yaml

    path = folder / "settings.yaml"
    path.write_text("scale: 1.5\nkinds: [a, b]\n")

    class Reads(Model):
        def settings(self):
            with open(path) as file:
                return yaml.safe_load(file)

        def odd(self, h):
            settings = self.settings()
            path.write_text(yaml.safe_dump({**settings, "scale": settings["scale"] + 1}))
            return h * settings["scale"] * len(settings["kinds"])

    return Reads(), path.read_text


@program("sympy")
def sympy_derivative(folder):
    import sympy

    def odd(h):
        x = sympy.Symbol("x")
        slope = sympy.diff(sympy.sin(x) * x, x).subs(x, 1)
        return h * float(slope)

    return Model(odd)


@program("matplotlib")
def matplotlib_figure(folder):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = []

    def odd(h):
        figure = Figure(figsize=(1, 1))
        figure.add_subplot().plot(h.detach().mean(1).numpy())
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        sizes.append(len(canvas.buffer_rgba()))
        return h + sizes[-1] / 1e4

    return Model(odd), lambda: list(sizes)


@program("safetensors")
def safetensors_file(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "h.safetensors"

    class Saves(Model):
        def odd(self, h):
            save_file({"h": h.detach().contiguous()}, path)
            return h + load_file(path)["h"].mean()

    return Saves(dropout=0.3)


@program("jinja2")
def jinja_template(folder):
    import jinja2

    template = jinja2.Template("{% for m in means %}{{ '%.2f' | format(m) }};{% endfor %}")
    texts = []

    def odd(h):
        texts.append(template.render(means=h.detach().mean(1).tolist()))
        return h * texts[-1].count(";")

    return Model(odd), lambda: list(texts)


@program("orjson")
def orjson_round_trip(folder):
    import orjson

    def odd(h):
        values = orjson.loads(orjson.dumps({"means": h.detach().mean(0).tolist()}))
        return h - torch.tensor(values["means"])

    return Model(odd, norm=True)


@program("msgpack")
def msgpack_stream(folder):
    import msgpack

    path = folder / "stream"
    path.touch()

    class Streams(Model):
        def odd(self, h):
            with open(path, "ab") as file:
                file.write(msgpack.packb({"rows": h.shape[0], "mean": h.mean().item()}))
            with open(path, "rb") as file:
                records = list(msgpack.Unpacker(file))
            return h * len(records)

    return Streams(), lambda: path.stat().st_size


@program("psutil")
def psutil_own_process(folder):
    import psutil

    def odd(h):
        process = psutil.Process()
        return h * (2.0 if process.memory_info().rss > 0 and process.is_running() else 1.0)

    return Model(odd)


@program("click")
def click_echo_and_runner(folder):
    import click
    from click.testing import CliRunner

    @click.command()
    @click.option("--rows", type=int)
    def command(rows):
        click.echo(f"rows {rows}")

    def odd(h):
        result = CliRunner().invoke(command, ["--rows", str(h.shape[0])])
        return h * len(result.output)

    return Model(odd)


@program("filelock")
def filelock_around_a_counter(folder):
    from filelock import FileLock

    path = folder / "count.json"
    path.write_text("0")

    class Counts(Model):
        def odd(self, h):
            with FileLock(str(path) + ".lock"):
                n = json.loads(path.read_text()) + 1
                path.write_text(json.dumps(n))
            return F.normalize(h) * n

    return Counts(), path.read_text
