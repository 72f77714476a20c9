"""Programs that were written when all others were mended, of kinds of their own."""

from __future__ import annotations

import array
import bz2
import collections
import difflib
import email.message
import fractions
import functools
import glob
import heapq
import html.parser
import io
import multiprocessing.pool
import os
import sched
import statistics
import string
import struct
import tarfile
import textwrap
import time
import tracemalloc
import unittest.mock
import xml.etree.ElementTree as ElementTree
import zipfile

import torch
from torch.nn import functional as F

from eager_call_programs.common import Model, program


@program(aside=True)
def zip_archive_in_memory(folder):
    path = folder / "archive.zip"

    class Packs(Model):
        def odd(self, h):
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr(f"{len(archive.namelist())}.txt", f"{h.shape[0]}")
                names = archive.namelist()
            return h * len(names)

    return Packs(norm=True), lambda: zipfile.ZipFile(path).namelist() if path.exists() else []


@program(aside=True)
def tar_of_a_tensor(folder):
    def odd(h):
        out, values = io.BytesIO(), bz2.compress(h.detach().numpy().tobytes())
        with tarfile.open(fileobj=out, mode="w") as tar:
            entry = tarfile.TarInfo("h")
            entry.size = len(values)
            tar.addfile(entry, io.BytesIO(values))
        back = tarfile.open(fileobj=io.BytesIO(out.getvalue())).extractfile("h").read()
        return h + torch.frombuffer(bytearray(bz2.decompress(back)), dtype=torch.float32).view_as(h)

    return Model(odd)


@program(aside=True)
def xml_document_grows(folder):
    root = ElementTree.Element("steps")

    class Writes(Model):
        def odd(self, h):
            step = ElementTree.SubElement(root, "step", rows=str(h.shape[0]))
            step.text = str(len(root))
            return h / float(root[-1].text)

    return Writes(), lambda: ElementTree.tostring(root)


class _Counts(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = collections.Counter()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1


@program(aside=True)
def html_is_parsed(folder):
    def odd(h):
        parser = _Counts()
        parser.feed("".join("<b>" if v > 0.2 else "<i>" for v in h.mean(1).tolist()))
        return h * (1 + parser.tags["b"])

    return Model(odd, dropout=0.2)


@program(aside=True)
def scheduler_of_events(folder):
    order = []

    class Schedules(Model):
        def odd(self, h):
            events = sched.scheduler(time.monotonic, time.sleep)
            events.enter(0.002, 1, order.append, ("late",))
            events.enter(0.0, 1, order.append, ("early",))
            events.run()
            return h * len(order)

    return Schedules(), lambda: list(order)


@program(aside=True)
def pool_maps_over_rows(folder):
    def odd(h):
        with multiprocessing.pool.ThreadPool(2) as pool:
            return torch.stack(pool.map(torch.tanh, list(h)))

    return Model(odd)


@program(aside=True)
def mock_of_a_function(folder):
    calls = []

    class Mocks(Model):
        def odd(self, h):
            with unittest.mock.patch.object(F, "softplus", side_effect=lambda x: x * 3) as mock:
                h = F.softplus(h)
                calls.append(mock.call_count)
            return h

    return Mocks(), lambda: list(calls)


@program(aside=True)
def memory_is_traced(folder):
    peaks = []

    def odd(h):
        tracemalloc.start()
        values = [bytes(100) for _ in range(50)]
        current, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peaks.append(current > 1000)
        return h * (len(values) if peaks[-1] else 0)

    return Model(odd, norm=True), lambda: list(peaks)


@program(aside=True)
def struct_into_a_ring_buffer(folder):
    ring, position = bytearray(32), [0]

    class Packs(Model):
        def odd(self, h):
            struct.pack_into("<q", ring, position[0], h.shape[0] + position[0])
            position[0] = (position[0] + 8) % len(ring)
            return h + sum(struct.unpack("<4q", ring))

    return Packs(), lambda: (bytes(ring), list(position))


@program(aside=True)
def environment_is_changed(folder):
    name = f"PROGRAM_{folder.name.upper()}_STEPS"
    os.environ[name] = "0"

    def odd(h):
        os.environ[name] = str(int(os.environ[name]) + 1)
        return h * int(os.environ[name])

    return Model(odd), lambda: os.environ[name]


@program(aside=True)
def files_by_pattern(folder):
    class Lists(Model):
        def odd(self, h):
            (folder / f"{len(os.listdir(folder))}.step").touch()
            return F.dropout(h, 0.1) * len(glob.glob(str(folder / "*.step")))

    return Lists(), lambda: sorted(os.listdir(folder))


@program(aside=True)
def heap_of_best_rows(folder):
    best = []

    class Keeps(Model):
        def odd(self, h):
            for i, v in enumerate(h.detach().amax(1).tolist()):
                heapq.heappush(best, (round(v, 3), i))
            top = heapq.nlargest(2, best)
            return h + statistics.fmean(v for v, _ in top)

    return Keeps(norm=True), lambda: list(best)


@program(aside=True)
def mail_and_template(folder):
    sent = []

    def odd(h):
        message = email.message.EmailMessage()
        message["Subject"] = string.Template("rows $n").substitute(n=h.shape[0])
        message.set_content(textwrap.fill("done " * 20, 30))
        sent.append(message.as_string())
        return h * difflib.SequenceMatcher(None, sent[0], sent[-1]).ratio()

    return Model(odd), lambda: list(sent)


@program(aside=True)
def dispatch_by_type(folder):
    seen = []

    @functools.singledispatch
    def scale(value):
        return 1.0

    @scale.register
    def _(value: fractions.Fraction):
        seen.append(str(value))
        return float(value)

    class Scales(Model):
        def forward(self, x):
            h = self.first(x)
            return self.last(h * scale(fractions.Fraction(h.shape[0], 3)))

    return Scales(dropout=0.1), lambda: list(seen)


@program(aside=True)
def array_of_seen_maxima(folder):
    maxima = array.array("d")

    class Appends(Model):
        def __init__(self):
            super().__init__(norm=True)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def odd(self, h):
            maxima.append(float(h.detach().max()))
            h.untyped_storage()
            return h * self.scale / max(maxima)

    return Appends(), lambda: [round(v, 4) for v in maxima]
