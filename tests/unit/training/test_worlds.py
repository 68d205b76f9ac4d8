"""Runs of several ranks with an agent: the same experiment on any world, and everybody stops after the same step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.checkpoint.manifest import read_manifest
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.progress.page import Phase
from slurm_resilience.training.metrics import history

from . import programs
from .worlds import RankError, run_world, start

EVERY_3: dict[str, Any] = {"checkpoint": {"every_steps": 3, "every_min": None, "keep_last": 9}}


def furthest(mine: dict[int, float], theirs: dict[int, float]) -> float:
    assert mine.keys() == theirs.keys()
    return max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in theirs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (result,) = run_world(1, programs.train, 20, run_dir=tmp_path_factory.mktemp("undisturbed"), settings=EVERY_3)
    assert len(result["loss"]) == 20
    return dict(result)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_four_three_two_four_ranks_are_the_same_experiment(tmp_path: Path, undisturbed: dict[str, Any], kind: str) -> None:
    losses: dict[int, float] = {}
    for attempt, (world, total) in enumerate([(4, 5), (3, 10), (2, 13), (4, 20)], 1):
        program = programs.train if kind == "fsdp" else programs.train_ddp
        results = run_world(world, program, total, run_dir=tmp_path, attempt=attempt, settings=EVERY_3)
        for rank, result in enumerate(results):
            assert result["loss"] == results[0]["loss"], rank
            assert result["ids"] == {step: undisturbed["ids"][step] for step in result["ids"]}
            assert result["lr"] == {step: undisturbed["lr"][step] for step in result["lr"]}, "the rate follows the world"
            assert result["rng"] == (None if attempt == 1 else "derived")
            if kind == "fsdp":  # gradients cross the ranks at the last micro-batch only
                assert set(result["reduced"]) == {(False, False), (True, True)}
        for step, ids in results[0]["ids"].items():
            taken = sorted(sample for result in results for sample in result["samples"][step])
            assert taken == sorted(ids)
        losses |= results[0]["loss"]
    assert furthest(losses, undisturbed["loss"]) <= 1e-5
    assert furthest({step: line["loss"] for step, line in history(tmp_path).items()}, undisturbed["loss"]) <= 1e-5


def test_the_same_world_goes_on_bit_by_bit_random_numbers_included(tmp_path: Path) -> None:
    options: dict[str, Any] = {"settings": EVERY_3}
    whole = run_world(2, programs.train_dropout, 8, run_dir=tmp_path / "whole", **options)
    first = run_world(2, programs.train_dropout, 3, run_dir=tmp_path / "parts", **options)
    second = run_world(2, programs.train_dropout, 8, run_dir=tmp_path / "parts", attempt=2, **options)
    for rank in range(2):
        assert second[rank]["rng"] == "exact"
        for name in ("loss", "drawn", "samples"):
            assert {**first[rank][name], **second[rank][name]} == whole[rank][name], name
        assert second[rank]["weights"] == whole[rank]["weights"]
    assert whole[0]["drawn"] != whole[1]["drawn"]


def test_new_ranks_do_not_copy_each_others_random_numbers(tmp_path: Path) -> None:
    """Rank-suffixed keys are there for fewer ranks than load: nobody misses one, and all do the same."""
    run_world(2, programs.train_dropout, 2, run_dir=tmp_path, settings=EVERY_3)
    grown = run_world(3, programs.train_dropout, 4, run_dir=tmp_path, attempt=2, settings=EVERY_3)
    assert [one["rng"] for one in grown] == ["derived"] * 3
    assert len({one["drawn"][3] for one in grown}) == 3


def test_all_ranks_stop_after_the_same_step_though_one_is_slow_and_one_was_asked(tmp_path: Path) -> None:
    """Lightning#20806: rank 0 left at step N, the others waited for it in N's collective."""
    started = start(3, programs.train_slow, 1000, run_dir=tmp_path, settings=EVERY_3)
    started.until(lambda: all(one.step >= 1 for one in started.progress()))
    deadline = time.time() + 600
    started.pages[2].order(stop=True, cause="preemption", deadline=deadline)
    started.until(lambda: all(page.read().done for page in started.pages))
    assert all(one.phase in (Phase.STEP, Phase.USER) for one in started.progress())
    results = started.results()
    (step,) = {one["step"] for one in results}
    assert {one["outcome"] for one in results} == {"stopped"}
    stopped = [(fact["fields"]["step"], fact["fields"]["why"], fact["fields"]["saved"]) for fact in started.of("stopped")]
    assert stopped == [(step, "preemption", True)] * 3
    store = CheckpointStore.open(tmp_path / "checkpoints")
    assert max(entry.step for entry in store.entries()) == step
    again = run_world(2, programs.train, step + 1, run_dir=tmp_path, attempt=2, settings=EVERY_3)
    assert [one["start"] for one in again] == [step, step]


def test_a_save_that_cannot_end_in_time_is_not_begun(tmp_path: Path) -> None:
    started = start(2, programs.train_slow_saves, 1000, run_dir=tmp_path, settings=EVERY_3)
    started.until(lambda: all(one.step >= 4 for one in started.progress()))  # one save has shown its cost
    for page in started.pages:
        page.order(stop=True, cause="time_limit", deadline=time.time() + 0.2)
    results = started.results()
    assert len({one["step"] for one in results}) == 1
    assert [fact["fields"]["saved"] for fact in started.of("stopped")] == [False, False]
    assert "not begun" in started.of("checkpoint_failed")[0]["fields"]["error"]


def test_an_order_to_save_is_obeyed_once_per_number(tmp_path: Path) -> None:
    settings = {"checkpoint": {"every_min": None, "keep_last": 9}}
    started = start(2, programs.train_slow, 100_000, run_dir=tmp_path, settings=settings)
    started.until(lambda: all(one.step >= 1 for one in started.progress()))
    for page in started.pages:
        page.order(save=1)
    started.until(lambda: len(started.of("checkpoint_committed")) == 1)
    started.pages[0].order(save=2)
    started.until(lambda: len(started.of("checkpoint_committed")) == 2)
    second = started.of("checkpoint_committed")[1]["fields"]["step"]
    started.until(lambda: all(one.step >= second + 3 for one in started.progress()))
    for page in started.pages:
        page.order(stop=True, save=2, cause="cancelled")
    (step,) = {one["step"] for one in started.results()}
    steps = [fact["fields"]["step"] for fact in started.of("checkpoint_committed")]
    assert len(steps) == 3
    assert steps[-1] == step


def test_facts_come_from_whom_they_should(tmp_path: Path) -> None:
    started = start(2, programs.train, 4, run_dir=tmp_path, settings=EVERY_3)
    started.results()
    per_kind = {kind: sorted(fact["rank"] for fact in started.of(kind)) for kind in {fact["kind"] for fact in started.facts}}
    assert per_kind == {
        "started_fresh": [0, 1],
        "first_step": [0, 1],
        "step_reported": [0] * len(per_kind["step_reported"]),
        "checkpoint_started": [0, 0],
        "checkpoint_committed": [0, 0],
        "finished": [0, 1],
    }
    assert [fact["fields"]["step"] for fact in started.of("first_step")] == [1, 1]
    again = start(2, programs.train, 6, run_dir=tmp_path, attempt=2, settings=EVERY_3)
    again.results()
    assert {fact["fields"]["name"] for fact in again.of("phase_done")} == {"load", "restore", "verify"}
    resumed = [(fact["rank"], fact["fields"]["step"], fact["fields"]["world"]) for fact in again.of("resumed")]
    assert sorted(resumed) == [(0, 4, 2), (1, 4, 2)]


def test_damage_that_one_rank_alone_reads_condemns_the_entry_for_all(tmp_path: Path) -> None:
    run_world(3, programs.train, 6, run_dir=tmp_path, settings=EVERY_3)
    store = CheckpointStore.open(tmp_path / "checkpoints")
    newest = store.path(max(store.entries(), key=lambda entry: entry.order))
    item = next(one for one in read_manifest(newest).items if one.file == "__2_0.distcp" and one.key.endswith("exp_avg"))
    raw = bytearray((newest / item.file).read_bytes())
    raw[item.data_offset + 1] ^= 4
    (newest / item.file).write_bytes(raw)
    results = run_world(3, programs.train, 7, run_dir=tmp_path, attempt=2, settings=EVERY_3)
    assert [one["start"] for one in results] == [3, 3, 3]
    assert all(step == 6 and "damaged" in reason for one in results for step, reason in one["rejected"])


def test_a_checkpoint_of_another_model_is_an_error_on_every_rank_and_stays(tmp_path: Path) -> None:
    run_world(2, programs.train, 3, run_dir=tmp_path, settings=EVERY_3)
    with pytest.raises(RankError, match="holds another model than 'model'") as caught:
        run_world(2, programs.resume_wider_on_rank_1, run_dir=tmp_path, attempt=2, settings=EVERY_3)
    assert caught.value.kind == "MismatchedCheckpoint"
    assert [entry.usable for entry in CheckpointStore.open(tmp_path / "checkpoints").entries()] == [True]


def test_a_lost_peer_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    started = start(2, programs.train_slow, 1000, run_dir=tmp_path, settings=EVERY_3)
    started.until(lambda: all(one.step >= 1 for one in started.progress()))
    started.kill(1)
    assert started.answers[0].poll(100), "a group's own time-out is half an hour"
    said = started.answers[0].recv()
    started.end()
    assert said[0] == "error", said


def test_ranks_that_see_different_newest_checkpoints_follow_rank_0(tmp_path: Path) -> None:
    """Rank 1's directory cache is stale; nobody restores a mixture."""
    run_world(2, programs.train, 6, run_dir=tmp_path, settings=EVERY_3)
    assert run_world(2, programs.follow_own_entry, 3, run_dir=tmp_path, attempt=2, settings=EVERY_3) == [6, 6]


def test_one_ranks_failure_in_any_stage_of_restoring_is_everybodys(tmp_path: Path) -> None:
    run_world(3, programs.train, 3, run_dir=tmp_path, settings=EVERY_3)
    told = run_world(
        3, programs.resume_where_one_fails, str(tmp_path / "checkpoints"), str(tmp_path / "copies"), run_dir=tmp_path, attempt=2
    )
    assert all(one[""][0] == "" for one in told), "without a failure it resumes"
    assert all(one["accepting"][0] == "" for one in told), "a mark that cannot be written ends no run that is good"
    for stage in programs.STAGES[:-1]:
        kinds = {one[stage][0] for one in told}
        assert len(kinds) == 1, f"{stage}: {[one[stage] for one in told]}"
        assert kinds != {""}, f"{stage}: nobody was told"
        assert all(f"the disk of {stage}" in one[stage][1] for one in told), [one[stage] for one in told]


def test_streams_through_real_worlds_lose_nothing_that_their_workers_have_read_ahead(tmp_path: Path) -> None:
    """4 → 3 → 2 → 4 ranks with two workers each, in mid-epoch every time: every sample once per epoch."""
    trained: dict[int, list[tuple[int, int]]] = {}
    for attempt, (world, total) in enumerate([(4, 3), (3, 5), (2, 8), (4, 14)], 1):
        results = run_world(world, programs.train_streamed, total, run_dir=tmp_path, attempt=attempt)
        assert len({tuple(one["passes"].items()) for one in results}) == 1, "a rank makes fewer passes than another"
        for step in results[0]["passes"]:
            assert sum(one["weights"].get(step, 0.0) for one in results) == pytest.approx(1)
        for one in results:
            for epoch, places in one["trained"].items():
                trained.setdefault(epoch, []).extend(places)
    everything = [(shard, place) for shard, size in enumerate(programs.Pieces.sizes) for place in range(size)]
    *whole, last = (sorted(places) for _, places in sorted(trained.items()))
    assert len(whole) >= 2
    assert all(places == everything for places in whole)
    assert len(set(last)) == len(last)


@pytest.mark.parametrize(
    ("how", "evidence"),
    [
        ("labels", "rank 0 has models: stage0; rank 1 has models: stage1"),
        ("tensors", "begin with model.layer0.bias on rank 0, with model.layer1.bias on rank 1"),
    ],
)
def test_ranks_that_register_different_objects_are_refused_before_the_first_step(
    tmp_path: Path, how: str, evidence: str
) -> None:
    """They could save for hours, and the first checkpoint that had to be loaded could not be."""
    with pytest.raises(RankError, match="ConfigError") as refused:
        run_world(2, programs.register_by_rank, how, run_dir=tmp_path)
    assert evidence in str(refused.value)
    assert run_world(2, programs.register_by_rank, "alike", run_dir=tmp_path / "alike") == ["resumed", "resumed"]


@pytest.mark.parametrize(
    ("how", "evidence"), [("own", "weight.rows is another one on rank 1"), ("uneven", "weight.rows is float32 (1,)")]
)
def test_what_an_optimizer_keeps_for_its_ranks_part_in_a_plain_tensor_is_refused_when_it_is_saved(
    tmp_path: Path, how: str, evidence: str
) -> None:
    """One rank's would be given to all: a resume that looks right and trains on with the wrong state."""
    with pytest.raises(RankError, match="ConfigError") as refused:
        run_world(2, programs.optimize_by_rows, how, run_dir=tmp_path)
    assert evidence in str(refused.value)
    assert "each rank's own" in str(refused.value)
    assert run_world(2, programs.optimize_by_rows, "alike", run_dir=tmp_path / "alike") == [[[2.0] * 3]] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_always_wraps_its_model_works_where_one_rank_is_left(tmp_path: Path, ranks: int) -> None:
    assert run_world(ranks, programs.wrap_without_asking, ranks, run_dir=tmp_path) == [(ranks, 24.0)] * ranks
