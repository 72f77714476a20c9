import pytest

import thunder
from thunder.programs import keep


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty directory of programs, which this process has warned of nothing in."""
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(keep, "_warned", [])
    return tmp_path / "programs"


@pytest.fixture
def again(cache):
    """Compiles a function as another process would: nothing but the directory is shared. Says what it took from
    there."""

    def run(fn, *args, **options):
        compiled = thunder.jit(fn, keep_programs=True, **options)
        result = compiled(*args)
        return result, thunder.compile_stats(compiled)

    return run
