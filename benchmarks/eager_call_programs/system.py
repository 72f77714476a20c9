"""Parts that talk to the operating system, or to other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import csv
import ctypes
import datetime
import decimal
import http.server
import io
import json
import locale
import logging
import logging.handlers
import lzma
import mmap
import os
import pickle
import queue
import random
import secrets
import shelve
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import urllib.request
import uuid
import zlib

import numpy as np
import torch

from eager_call_programs.common import Model, program


@program()
def logging_to_a_file(folder):
    logger = logging.Logger("programs.file")
    logger.addHandler(logging.FileHandler(folder / "log"))

    class Logs(Model):
        def odd(self, h):
            logger.warning("mean %.4f", h.mean().item())
            h.untyped_storage()
            return h.relu() * 2

    return Logs(), (folder / "log").read_text


@program()
def logging_to_memory_handler(folder):
    out = io.StringIO()
    logger = logging.Logger("programs.memory")
    logger.addHandler(logging.handlers.MemoryHandler(2, target=logging.StreamHandler(out)))

    def odd(h):
        logger.info("rows %d", len(h))
        logger.error("sum %.3f", h.sum())
        return h + 1

    return Model(odd, norm=True), out.getvalue


@program()
def logging_queue_inline(folder):
    records = queue.SimpleQueue()
    logger = logging.Logger("programs.queue")
    logger.addHandler(logging.handlers.QueueHandler(records))

    class Logs(Model):
        def forward(self, x):
            h = self.first(x)
            logger.warning("first row %s", h[0, 0].item())
            return self.last(h * (1 + records.qsize()))

    return Logs(), records.qsize


@program()
def sqlite_inserts(folder):
    base = sqlite3.connect(folder / "rows.db")
    base.execute("create table means (n integer primary key, mean real)")

    class Stores(Model):
        def odd(self, h):
            with base:
                base.execute("insert into means (mean) values (?)", (round(h.mean().item(), 4),))
            (n,) = base.execute("select count(*) from means").fetchone()
            return h * n

    return Stores(), lambda: base.execute("select * from means").fetchall()


@program()
def sqlite_user_function(folder):
    def odd(h):
        base = sqlite3.connect(":memory:")
        base.create_function("twice", 1, lambda v: 2 * v)
        rows = base.execute("select twice(value) from json_each(?)", (json.dumps(h.detach()[0].tolist()),)).fetchall()
        return h + torch.tensor(rows).flatten().mean()

    return Model(odd)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        values = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(len(values))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"scale": 0.5 * len(self.server.seen)}).encode())

    def log_message(self, *args):
        pass


@program()
def http_request_to_a_local_server(folder):
    server = http.server.HTTPServer(("127.0.0.1", 0), _Handler)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/scale"

    class Asks(Model):
        def scale(self, values):
            request = urllib.request.Request(url, json.dumps(values).encode(), method="POST")
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)["scale"]

        def odd(self, h):
            return h * self.scale(h.detach()[0].tolist())

    return Asks(dropout=0.2), lambda: list(server.seen)


@program()
def socket_pair(folder):
    ours, theirs = socket.socketpair()

    def odd(h):
        ours.sendall(h.detach().numpy().tobytes())
        back = np.frombuffer(theirs.recv(1 << 20), dtype=np.float32).copy()
        return h + torch.from_numpy(back).view_as(h)

    return Model(odd)


@program()
def subprocess_echo(folder):
    class Runs(Model):
        def odd(self, h):
            code = f"print({h.shape[0]} * 3)"
            answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
            return h * float(answer.stdout)

    return Runs()


@program()
def subprocess_pipe_with_values(folder):
    def odd(h):
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cat:
            out, _ = cat.communicate(pickle.dumps(h.detach().mean(0).numpy()))
        return h - torch.from_numpy(pickle.loads(out))

    return Model(odd)


@program()
def ctypes_sort(folder):
    library = ctypes.CDLL(None)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_float))

    def odd(h):
        values = (ctypes.c_float * h.shape[1])(*h.detach()[0].tolist())
        less = compare(lambda a, b: (a[0] > b[0]) - (a[0] < b[0]))
        library.qsort(values, len(values), ctypes.sizeof(ctypes.c_float), less)
        return h + torch.tensor(list(values))

    return Model(odd)


@program()
def ctypes_writes_to_memory(folder):
    class Writes(Model):
        def odd(self, h):
            copied = h.detach().clone()
            ctypes.memset(copied.data_ptr(), 0, 4 * copied.shape[1])
            return h + copied

    return Writes(norm=True)


class _Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_double), ("n", ctypes.c_int)]


@program()
def ctypes_struct_counts(folder):
    point = _Point(0.5, 0)

    def odd(h):
        point.n += 1
        return h * point.x * point.n

    return Model(odd), lambda: point.n


@program()
def thread_per_row(folder):
    order = []

    class Threads(Model):
        def odd(self, h):
            rows = [None] * len(h)

            def work(i):
                rows[i] = h[i].exp().log1p()
                order.append(i)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(len(h))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return torch.stack(rows)

    return Threads(), lambda: sorted(order)


@program()
def pool_of_threads(folder):
    def odd(h):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(torch.sin, part) for part in h.chunk(2)]
            parts = [f.result() for f in concurrent.futures.as_completed(futures)]
        return h + sum(p.sum() for p in parts)

    return Model(odd, dropout=0.1)


@program()
def queue_with_a_worker(folder):
    requests, answered = queue.Queue(), queue.Queue()

    def work():
        while True:
            answered.put(requests.get() * 2)

    threading.Thread(target=work, daemon=True).start()

    class Sends(Model):
        def odd(self, h):
            requests.put(h.mean().item())
            return h + answered.get(timeout=20)

    return Sends()


@program()
def asyncio_gather(folder):
    async def half(h, k):
        await asyncio.sleep(0)
        return h[:, k::2]

    async def both(h):
        return await asyncio.gather(half(h, 0), half(h, 1))

    class Gathers(Model):
        def odd(self, h):
            return torch.cat(asyncio.run(both(h)), 1)

    return Gathers()


@program()
def asyncio_timeout_and_queue(folder):
    async def through(values):
        passed = asyncio.Queue()
        for v in values:
            await passed.put(v)
        return [await asyncio.wait_for(passed.get(), 10) for _ in values]

    def odd(h):
        loop = asyncio.new_event_loop()
        try:
            values = loop.run_until_complete(through(h.detach()[:, 0].tolist()))
        finally:
            loop.close()
        return h + torch.tensor(values)[:, None]

    return Model(odd, norm=True)


@program()
def open_file_is_read_line_by_line(folder):
    path = folder / "lines"
    path.write_text("".join(f"{k}\n" for k in range(50)))
    file = open(path)

    class Reads(Model):
        def odd(self, h):
            total = sum(float(file.readline()) for _ in range(3))
            os.fstat(file.fileno())
            return h + total

    return Reads(), file.tell


@program()
def mmap_counter(folder):
    path = folder / "counter"
    path.write_bytes(bytes(8))
    file = open(path, "r+b")
    memory = mmap.mmap(file.fileno(), 8)

    def odd(h):
        memory[0] = (memory[0] + 1) % 256
        return h * memory[0]

    return Model(odd), lambda: bytes(memory[:])


@program()
def numpy_memmap_is_written(folder):
    table = np.memmap(folder / "table", dtype=np.float32, mode="w+", shape=(4,))

    class Writes(Model):
        def odd(self, h):
            table[:] = h.detach().mean(1)[:4].numpy()
            table.flush()
            return h + torch.from_numpy(np.asarray(table)).sum()

    return Writes(), lambda: np.fromfile(folder / "table", dtype=np.float32).round(4).tolist()


@program()
def context_variable(folder):
    depth = contextvars.ContextVar("depth", default=1)

    def inside(h):
        depth.set(depth.get() + 1)
        return h * depth.get()

    def odd(h):
        context = contextvars.copy_context()
        return context.run(inside, h) + depth.get()

    return Model(odd), depth.get


@program()
def signal_handler_runs(folder):
    got = []

    class Signals(Model):
        def odd(self, h):
            before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
            finally:
                signal.signal(signal.SIGUSR1, before)
            return h * len(got)

    return Signals(), lambda: list(got)


@program()
def temporary_file(folder):
    def odd(h):
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(h.detach(), file)
            file.seek(0)
            return h + torch.load(file)

    return Model(odd)


@program()
def shelve_of_results(folder):
    name = str(folder / "shelf")

    class Shelves(Model):
        def odd(self, h):
            with shelve.open(name) as shelf:
                shelf["n"] = shelf.get("n", 0) + 1
                return h * shelf["n"]

    def state():
        with shelve.open(name) as shelf:
            return dict(shelf)

    return Shelves(norm=True), state


@program()
def zlib_and_lzma(folder):
    sizes = []

    def odd(h):
        values = (h.detach() > 0).numpy().tobytes()
        packed = lzma.compress(zlib.compress(values))
        sizes.append(len(packed))
        back = np.frombuffer(zlib.decompress(lzma.decompress(packed)), dtype=bool).copy()
        return h * torch.from_numpy(back).view_as(h)

    return Model(odd), lambda: list(sizes)


@program()
def random_and_uuid(folder):
    names = []

    class Draws(Model):
        def odd(self, h):
            names.append(str(uuid.UUID(int=random.getrandbits(128), version=4)))
            keep = random.sample(range(h.shape[1]), h.shape[1] // 2)
            h = h.clone()
            h[:, keep] = 0
            return h * (1 + np.random.rand())

    return Draws(dropout=0.2), lambda: list(names)


@program()
def secrets_are_new(folder):
    tokens = set()

    def odd(h):
        tokens.add(secrets.token_hex(8))
        return h * (len(tokens) + (secrets.randbelow(10) >= 0))

    return Model(odd), lambda: len(tokens)


@program()
def datetime_now(folder):
    stamps = []

    class Stamps(Model):
        def odd(self, h):
            stamps.append(datetime.datetime.now(datetime.UTC))
            rising = all(a <= b for a, b in zip(stamps, stamps[1:], strict=False))
            return h * (2.0 if rising else 0.0)

    return Stamps(), lambda: len(set(stamps))


@program()
def decimal_context(folder):
    def odd(h):
        with decimal.localcontext(decimal.Context(prec=4)) as context:
            share = decimal.Decimal(h.shape[0]) / 7
            inexact = bool(context.flags[decimal.Inexact])
        return h * float(share) + inexact

    return Model(odd)


@program()
def csv_report(folder):
    path = folder / "report.csv"
    path.touch()

    class Reports(Model):
        def odd(self, h):
            with open(path, "a", newline="") as file:
                writer = csv.DictWriter(file, ["row", "max"])
                writer.writerows({"row": i, "max": f"{v:.3f}"} for i, v in enumerate(h.max(1).values.tolist()))
            return h.cumsum(1)

    return Reports(), path.read_text


@program()
def locale_format(folder):
    texts = []

    def odd(h):
        before = locale.setlocale(locale.LC_NUMERIC)
        locale.setlocale(locale.LC_NUMERIC, "C")
        texts.append(locale.format_string("%.2f", h.detach().sum().item(), grouping=True))
        locale.setlocale(locale.LC_NUMERIC, before)
        return h * len(texts)

    return Model(odd), lambda: list(texts)
