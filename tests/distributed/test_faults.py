"""Ranks that end, hang, or run something else: the others end with an error that says so."""

import os
import re
import signal
import time

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


@pytest.mark.slow
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


def ballot():
    return agreement.ballot_of(torch.distributed.group.WORLD, "collective")


def goes_ahead(rank, size):
    """Rank 0 looks late whether the others agree, which wait for the next agreement by then."""
    look = agreement.Ballot._outcome
    if rank == 0:
        agreement.Ballot._outcome = lambda self, *args: time.sleep(0.3) or look(self, *args)
    try:
        for name in ("first", "second"):
            ballot().agree([name], 20.0)
    finally:
        agreement.Ballot._outcome = look


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_goes_ahead_is_no_error(ranks, size):
    ranks(size)(goes_ahead)


def gives_up_again_and_again(rank, size):
    """Rank 0 has given up for good, because of what another rank said at first, when that one tries for the second
    time."""
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(CollectiveError, match="run different programs"):
            ballot().agree([f"a collective of rank {rank % 2}"], 60.0)
        time.sleep(0.5 * rank)
    ballot().agree(["one that all run"], 60.0)
    return time.monotonic() - start


def test_ranks_that_never_agree_do_not_wait_for_each_other(ranks):
    assert max(ranks(2)(gives_up_again_and_again)) < 20
    assert max(ranks(4)(gives_up_again_and_again)) < 20


def says_nothing(rank, size):
    if rank == size - 1:
        ballot().agree(["what all have"], 20.0)
        return None
    ballot().agree(["what all have"], 20.0)
    with pytest.raises(CollectiveError) as caught:
        ballot().agree(["what some have"], 1.0)
    return str(caught.value)


def test_a_rank_that_compiles_nothing_is_named(ranks):
    *texts, _ = ranks(4)(says_nothing)
    for rank, text in enumerate(texts):
        assert (
            "rank 3 did not compile a program with the same collectives in time; in its last one, collective 1 of 1 is "
            f"what some have on rank {rank} and what all have on rank 3." in text
        ), text


class CountingStore:
    """A store that counts what is asked, and the bytes of texts that are read."""

    def __init__(self, store):
        self.store, self.calls, self.read = store, 0, 0

    def __getattr__(self, name):
        def call(*args):
            self.calls += 1
            answer = getattr(self.store, name)(*args)
            self.read += len(answer) if isinstance(answer, bytes) else 0
            return answer

        return call


@pytest.mark.parametrize("size", [2, 64, 65, 4096])
def test_agreement_asks_the_store_a_few_times_for_each_rank(size):
    """All ranks of a group, simulated in this process; the text is as long as that of a large program."""
    store, lines = CountingStore(torch.distributed.HashStore()), ["all_gather of bf16[4096, 4096]"] * 500
    ballots = [agreement.Ballot(store, "0", "collective", list(range(size)), rank) for rank in range(size)]
    for ballot in ballots[:-1]:
        ballot.say(lines)
    assert ballots[0]._silent(ballots[0].say(lines)) == size - 1
    before = store.calls
    for ballot in reversed(ballots):  # the last one is the last to come
        ballot.agree(lines, 1.0)
    assert store.calls - before <= 6 * size and store.calls <= 10 * size + 200 and store.read < 100 * size


def test_a_rank_that_was_the_first_to_speak_and_is_late_does_not_disturb_the_next_agreement():
    """It compares its text with others' when all have agreed, and one rank says what comes next."""
    store = CountingStore(torch.distributed.HashStore())
    late, other = (agreement.Ballot(store, "0", "collective", [0, 1], rank) for rank in (0, 1))
    compare = late._compare

    def compare_late(digest: str) -> None:
        other.agree(["column_parallel"], 1.0)
        following = other.say(["row_parallel"])
        compare(digest)
        assert other._outcome(following, 0.0) is None, "the other rank still waits"

    late._compare = compare_late
    late.agree(["column_parallel"], 1.0)
    late._compare = compare
    late.agree(["row_parallel"], 1.0)
    other.agree(["row_parallel"], 1.0)


def test_ranks_of_a_large_group_that_disagree_are_told_at_once():
    store = CountingStore(torch.distributed.HashStore())
    ballots = [agreement.Ballot(store, "0", "collective", list(range(200)), rank) for rank in range(200)]
    for ballot in ballots[:120]:
        ballot.say(["all_gather of f32[2]"])
    for ballot in ballots[120:][::-1] + ballots[:120]:
        mine, theirs, other = ("2", "3", 199) if ballot.me < 120 else ("3", "2", 0)
        with pytest.raises(CollectiveError) as caught:
            ballot.agree([f"all_gather of f32[{mine}]"], 1.0)
        said = f"all_gather of f32[{mine}] on rank {ballot.me} and all_gather of f32[{theirs}] on rank {other}."
        assert said in str(caught.value)


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
    state_dict = checkpoint.get_model_state_dict(module, checkpoint.StateDictOptions(full_state_dict=True))
    assert all(torch.equal(state_dict[k], t) for k, t in expected.items())


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
            [torch.distributed.group.WORLD], "so", torch.nn.Sequential(torch.nn.Linear(4, 6)).named_parameters()
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
