"""Ranks that end, hang, or run something else: the others end with an error that says so."""

import os
import re
import signal
import time
import types

import pytest
import torch

import thunder
from tests.distributed.launcher import Ranks
from thunder.distributed import agreement, checkpoint, column_parallel, ddp, fsdp
from thunder.errors import CollectiveError


def model():
    torch.manual_seed(0)
    return thunder.jit(fsdp(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))))


def step(module, x):
    module.zero_grad()
    module(x).square().sum().backward()


def ends_in_the_second_step(rank, size, lost):
    module = model()
    step(module, torch.ones(3, 4))
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        step(module, torch.ones(3, 4))
    return str(caught.value), time.monotonic() - start


ends_in_the_second_step.ends_process = True  # as the error ends a program: those who wait for this rank hear of it


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_killed_is_named(size):
    ranks = Ranks(size)
    with pytest.raises(AssertionError, match=rf"rank {size - 1}: the process ended"):
        ranks(ends_in_the_second_step, size - 1)
    for rank, (text, seconds) in ranks.answers.items():
        # ranks that have failed for it end as well, some before others look
        ended = rf"failed on rank {rank}: (rank \d has ended; )*rank {size - 1} has ended\.\nThe backend says: "
        assert text.startswith("all_gather of float32[") and re.search(ended, text), text
        assert seconds < 20
    assert sorted(ranks.answers) == list(range(size - 1))


def hangs(rank, size, gave_up):
    module = model()
    step(module, torch.ones(3, 4))
    start = time.monotonic()
    if rank == 1:
        while not gave_up.exists() and time.monotonic() < start + 12:
            time.sleep(0.05)
        return None
    with pytest.raises(CollectiveError) as caught:
        step(module, torch.ones(3, 4))
    gave_up.touch()
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path):
    ranks = Ranks(2, patience=3.0)
    (text, seconds), _ = ranks(hangs, tmp_path / "gave up")
    assert "rank 1 says nothing: it hangs, or is at something else" in text
    assert 2.5 < seconds < 12
    ranks.close()


def runs_other_code(rank, size):
    def program(x):
        group = torch.distributed.group.WORLD
        y = thunder.torch.all_reduce(x, "sum", group)
        return thunder.torch.all_reduce(y[:2], "sum", group) if rank else thunder.torch.all_gather(y, group)

    with pytest.raises(CollectiveError) as caught:
        thunder.jit(program)(torch.ones(3, 4))
    assert "run different programs" in str(caught.value)
    return str(caught.value)


def test_other_code_is_an_error_before_anything_runs(ranks):
    mine = ("all_gather of f32[3, 4]", "all_reduce of f32[2, 4] ('sum')")
    for rank, text in enumerate(ranks(2)(runs_other_code)):
        assert f"collective 2 of 2 is {mine[rank]} on rank {rank} and {mine[1 - rank]} on rank {1 - rank}." in text, (
            text
        )


def goes_ahead(rank, size):
    """Rank 0 looks up late that rank 1 agrees, which waits for the next agreement by then."""
    before = agreement.time
    agreement.time = types.SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda seconds: time.sleep(seconds if rank else 0.5)
    )
    time.sleep(0.2 * rank)
    try:
        for name in ("first", "second"):
            agreement._agree(torch.distributed.group.WORLD, [name])
    finally:
        agreement.time = before


def test_a_rank_that_goes_ahead_is_no_error(ranks):
    ranks(2)(goes_ahead)


def gives_up_again_and_again(rank, size):
    """Rank 0 has given up for good, because of what rank 1 said at first, when rank 1 tries for the second time."""
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(CollectiveError, match="run different programs"):
            agreement._agree(torch.distributed.group.WORLD, [f"a collective of rank {rank}"])
        time.sleep(0.5 * rank)
    return time.monotonic() - start


def test_ranks_that_never_agree_do_not_wait_for_each_other(ranks):
    assert max(ranks(2)(gives_up_again_and_again)) < 20


def has_batches_of_its_own(rank, size):
    module = model()
    for rows in ((3, 3), (3, 5), (4, 5), (3, 3)):  # which rank compiles anew differs
        step(module, torch.ones(rows[rank], 4))
    return thunder.cache_misses(module)


def test_ranks_may_have_batches_of_other_sizes(ranks):
    assert ranks(2)(has_batches_of_its_own) == [2, 2]


def is_killed_in_a_save(rank, size, folder):
    module = model()
    state = {"model": checkpoint.get_model_state_dict(module)}
    checkpoint.save(state, folder)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1)
    if rank == 1:
        import torch.distributed.checkpoint as dcp

        dcp.FileSystemWriter.write_data = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        checkpoint.save(state, folder)
    return str(caught.value)


def whole(rank, size, folder):
    module = model()
    expected = checkpoint.get_model_state_dict(module, checkpoint.StateDictOptions(full_state_dict=True))
    state = {"model": checkpoint.get_model_state_dict(module)}
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    checkpoint.load(state, folder)
    found = checkpoint.get_model_state_dict(module, checkpoint.StateDictOptions(full_state_dict=True))
    assert all(torch.equal(found[k], t) for k, t in expected.items())


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(ranks, tmp_path):
    those = Ranks(2)
    with pytest.raises(AssertionError, match="rank 1: the process ended"):
        those(is_killed_in_a_save, tmp_path / "state")
    assert "rank 1 has ended" in those.answers[0], those.answers[0]
    ranks(2)(whole, tmp_path / "state")


def prepares_another_module(rank, size):
    texts = []
    for _ in range(2):  # what one rank prepares below was prepared by all, once
        agreement.check_same_module(
            [torch.distributed.group.WORLD], torch.nn.Sequential(torch.nn.Linear(4, 6)).named_parameters()
        )
    for prepare in (ddp, fsdp, lambda m: column_parallel(m, ["0"])):
        with pytest.raises(CollectiveError) as caught:
            prepare(torch.nn.Sequential(torch.nn.Linear(4, 4 + 2 * rank)))
        texts.append(str(caught.value))
    return texts


def test_other_modules_are_an_error_before_anything_is_sent(ranks):
    for rank, texts in enumerate(ranks(2)(prepares_another_module)):
        mine = ("0.weight of float32[4, 4]", "0.weight of float32[6, 4]")
        for text in texts:
            assert (
                f"prepare different modules: parameter 1 of 2 is {mine[rank]} on rank {rank} and {mine[1 - rank]} on "
                f"rank {1 - rank}." in text
            ), text
