"""The batch is a constant: exact sums, exact weights, one number of passes, the same cuts for every world."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.elastic import BatchPlan, loss_scale, plan_batch
from slurm_resilience.errors import ConfigError

DEALS = st.sampled_from(["even", "whole"])


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    ranks = draw(st.integers(1, 70))
    batch = draw(st.integers(ranks, 600))
    return plan_batch(batch, draw(st.integers(1, 40)), ranks, deal=draw(DEALS))


def owned(plan: BatchPlan, rank: int) -> list[int]:
    return [place for micro in plan.micro_batches(rank) if not micro.filler for place in micro.positions]


@given(plans())
def test_every_sample_belongs_to_exactly_one_rank(plan: BatchPlan) -> None:
    places = [place for rank in range(plan.dp_ranks) for place in owned(plan, rank)]
    assert sorted(places) == list(range(plan.global_batch))
    assert [len(owned(plan, rank)) for rank in range(plan.dp_ranks)] == list(plan.samples_per_rank)
    assert sum(plan.samples_per_rank) == plan.global_batch
    assert sorted(n for count, n in plan.runs for _ in range(count)) == sorted(plan.samples_per_rank)


@given(plans())
def test_weights_sum_to_one_exactly(plan: BatchPlan) -> None:
    assert sum(plan.weight_of(rank) for rank in range(plan.dp_ranks)) == 1
    for rank in range(plan.dp_ranks):
        assert sum(micro.weight for micro in plan.micro_batches(rank)) == plan.weight_of(rank)


@given(plans())
def test_every_rank_makes_the_same_number_of_passes(plan: BatchPlan) -> None:
    assert {len(plan.micro_batches(rank)) for rank in range(plan.dp_ranks)} == {plan.accumulation}
    for rank in range(plan.dp_ranks):
        for micro in plan.micro_batches(rank):
            assert 1 <= len(micro.positions) <= plan.micro_batch
            assert micro.filler == (micro.weight == 0) == (micro.mean_scale == 0)


@given(plans())
def test_even_ranks_differ_by_one_sample_and_none_idles(plan: BatchPlan) -> None:
    even = BatchPlan(plan.global_batch, plan.micro_batch, plan.dp_ranks, "even")
    assert max(even.samples_per_rank) - min(even.samples_per_rank) <= 1
    assert even.idle_ranks == ()
    assert plan.idle_ranks == tuple(rank for rank, count in enumerate(plan.samples_per_rank) if count == 0)
    assert even.accumulation == BatchPlan(plan.global_batch, plan.micro_batch, plan.dp_ranks, "whole").accumulation


@given(plans())
def test_micro_batches_are_the_single_process_ones(plan: BatchPlan) -> None:
    """Whole: all of them.  Even: all but those of the last, partial pass."""
    alone = BatchPlan(plan.global_batch, plan.micro_batch, 1, plan.deal)
    cuts = {micro.positions for micro in alone.micro_batches(0)}
    for rank in range(plan.dp_ranks):
        micros = [micro.positions for micro in plan.micro_batches(rank) if not micro.filler]
        full = micros if plan.deal == "whole" else micros[: plan.global_batch // (plan.micro_batch * plan.dp_ranks)]
        assert set(full) <= cuts


@given(plans(), st.randoms(use_true_random=False), st.sampled_from(["mean", "sum"]), st.sampled_from(["mean", "sum"]))
def test_the_reduced_gradient_is_the_single_process_gradient(plan, random, loss, reduce) -> None:
    """In exact arithmetic, for a mean or a sum loss, and a framework that takes the mean or the sum over ranks."""
    gradients = [Fraction(random.randint(-1000, 1000)) for _ in range(plan.global_batch)]
    total = Fraction(0)
    for rank in range(plan.dp_ranks):
        for micro in plan.micro_batches(rank, reduce=reduce):
            part = sum((gradients[place] for place in micro.positions), Fraction(0))
            if loss == "mean":
                part /= len(micro.positions)
            exact = micro.weight * plan.dp_ranks if reduce == "mean" else micro.weight
            if loss == "sum":
                exact /= len(micro.positions)
            assert float(exact) == (micro.mean_scale if loss == "mean" else micro.sum_scale)
            total += part * exact
    assert (total / plan.dp_ranks if reduce == "mean" else total) == sum(gradients) / plan.global_batch


def test_pass_by_pass_the_ranks_take_the_cuts_of_one_process_in_its_order() -> None:
    """Pass p of rank r of W is cut p*W + r: a pass over all ranks sees what stands together in a single process."""
    for deal in ("even", "whole"):
        plan = BatchPlan(48, 4, 3, deal)
        passes = [plan.micro_batches(rank) for rank in range(3)]
        taken = [[passes[rank][number].positions for rank in range(3)] for number in range(plan.accumulation)]
        assert taken == [[range(4 * cut, 4 * cut + 4) for cut in range(3 * number, 3 * number + 3)] for number in range(4)]


def test_the_seed_case_2048_over_48() -> None:
    plan = plan_batch(2048, 4, 48)
    assert plan.runs == ((32, 43), (16, 42))
    assert plan.accumulation == 11
    assert plan.weight_of(0) == Fraction(43, 2048)
    assert plan_batch(2048, 4, 64).runs == ((64, 32),)


def test_equal_averaging_of_unequal_ranks_is_not_the_gradient() -> None:
    """Accumulation of max // current (+1 for low ranks), every rank averaged equally: not the gradient of one process."""
    gradients = [place**2 for place in range(10)]
    plan = plan_batch(10, 1, 4)
    means = [Fraction(sum(gradients[p] for p in owned(plan, r)), len(owned(plan, r))) for r in range(4)]
    right = Fraction(sum(gradients), 10)
    assert sum(means) / 4 != right
    assert sum(mean * plan.weight_of(rank) for rank, mean in enumerate(means)) == right


@given(st.data())
def test_token_weights_with_unequal_counts_and_a_partial_window(data: st.DataObject) -> None:
    plan = data.draw(plans())
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=plan.global_batch, max_size=plan.global_batch))
    total = sum(tokens)
    if total == 0:
        return
    gradient = Fraction(0)
    for rank in range(plan.dp_ranks):
        for micro in plan.micro_batches(rank):
            count = 0 if micro.filler else sum(tokens[place] for place in micro.positions)
            summed = sum(Fraction(tokens[place] * place) for place in micro.positions)
            scale = loss_scale(count, total, plan.dp_ranks, loss="sum")
            assert scale == (float(Fraction(plan.dp_ranks, total)) if count else 0.0)
            gradient += Fraction(plan.dp_ranks, total) * summed if count else 0
            if count:
                assert loss_scale(count, total, plan.dp_ranks) == float(Fraction(count * plan.dp_ranks, total))
    assert gradient / plan.dp_ranks == Fraction(sum(n * place for place, n in enumerate(tokens)), total)


def test_a_short_batch_is_weighted_by_its_own_size_and_says_who_idles() -> None:
    plan = plan_batch(8, 1, 4).resized(3)
    assert plan.samples_per_rank == (1, 1, 1, 0)
    assert plan.idle_ranks == (3,)
    assert [m.weight for r in range(4) for m in plan.micro_batches(r)] == [Fraction(1, 3)] * 3 + [0]
    assert plan.resized(3) is plan
    with pytest.raises(ValueError, match="a batch of 0 samples"):
        plan.resized(0)


def test_the_number_of_steps_does_not_depend_on_the_micro_batch() -> None:
    for micro in range(1, 65):
        assert sum(plan_batch(64, micro, 4).samples_per_rank) == 64


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "words"),
    [(0, 1, 1, "global_batch=0"), (4, 0, 1, "micro_batch=0"), (4, 1, 0, "dp_ranks=0"), (3, 1, 4, "at most 3")],
)
def test_nonsense_is_refused_with_what_to_do(batch: int, micro: int, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_batch(batch, micro, ranks)


@pytest.mark.parametrize(("count", "total"), [(0, 0), (5, 4), (-1, 4)])
def test_a_weight_without_a_total_is_refused(count: int, total: int) -> None:
    with pytest.raises(ConfigError):
        loss_scale(count, total, 2)
