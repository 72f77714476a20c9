"""The process that forks for each job of another one: `python -m thunder.runtime.fork_server module seconds`.

What is imported and has run once is ready in each fork: Triton needs most of a second for its first kernel, and 0.1 to
0.4 s for another one. The process calls `module.prepare()` and then takes connections from its standard input, a
socket. A fork reads a pickled job from its connection, calls `job.compile()`, writes the result, pickled, and the words
of what was raised or None, and ends. All end when the standard input does, and after so many seconds without a job.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import selectors
import socket
import sys

from thunder.runtime.compiler_process import compiled, end_all


def _serve(connection: socket.socket) -> None:
    """In a fork."""
    with connection.makefile("rwb") as stream:
        pickle.dump(compiled(lambda: pickle.load(stream)), stream)


def _fork(control: socket.socket, connection: socket.socket) -> tuple[int, int]:
    """The fork's process number, and a descriptor at whose end it has ended."""
    alive, held = os.pipe()
    process = os.fork()
    if not process:
        status = 1
        try:
            os.close(alive)
            control.close()
            _serve(connection)
            status = 0
        finally:
            os._exit(status)
    os.close(held)
    return process, alive


def main() -> None:
    """Serves requests for forks of this process until it has been idle for a while."""
    with contextlib.suppress(Exception):  # what is missing fails in a fork, which says so
        importlib.import_module(sys.argv[1]).prepare()
    control, idle = socket.socket(fileno=sys.stdin.fileno()), float(sys.argv[2])
    with selectors.DefaultSelector() as waiting:
        waiting.register(control, selectors.EVENT_READ)
        while ready := waiting.select(None if len(waiting.get_map()) > 1 else idle):
            for key, _ in ready:
                if key.fileobj is control:
                    said, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                    if not said:
                        end_all()
                    connection = socket.socket(fileno=descriptors[0])
                    try:
                        process, alive = _fork(control, connection)
                    except OSError:  # the machine gives no more processes
                        with connection:
                            _serve(connection)
                        continue
                    waiting.register(alive, selectors.EVENT_READ, (process, connection))
                else:
                    process, connection = key.data
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
                    with connection:
                        if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
                            with contextlib.suppress(OSError):  # nobody waits for it any more
                                connection.sendall(pickle.dumps((None, f"its process has ended with {code}")))


if __name__ == "__main__":
    main()
