"""``slurm-resilience plan mesh`` as others script against it."""

from __future__ import annotations

import json

import pytest

from slurm_resilience.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "mesh", *words]) == 0
    return capsys.readouterr().out


def test_json_has_the_documented_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "6", "--gpus-per-node", "8", "--tp", "4", "--global-batch", "2048", "--micro-batch", "4", "--json"]
    document = json.loads(run(capsys, *words))
    assert document["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 12, "cp": 1, "tp": 4, "ep": 1}
    assert (document["ranks"], document["accumulation"], document["spares"]) == (48, 43, 0)
    assert document["samples_per_dp_rank"] == [171] * 8 + [170] * 4
    assert [smaller["ranks"] for smaller in document["smaller"]] == [40, 32, 24, 16, 8]
    assert all(sum(smaller["samples_per_dp_rank"]) == 2048 for smaller in document["smaller"])


def test_47_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "--nodes", "6", "--gpus-per-node", "8(x5),7", "--tp", "4", "--json"))
    assert (document["ranks"], document["spares"]) == (44, 3)
    assert "accumulation" not in document


def test_the_table_has_a_line_for_each_allocation(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "--nodes", "4", "--gpus-per-node", "8", "--tp", "8", "--pp", "2", "--global-batch", "64").splitlines()
    assert [line.split()[0] for line in lines] == ["nodes", "4", "3", "2", "No"]
    assert "pp 2 x dp_shard 2 x tp 8" in lines[1]
    assert "32 (x2, 32/64)" in lines[1]
    assert lines[-1] == "No mesh fits on fewer than 2 nodes."


def test_nodes_are_one_number_or_the_fewest_and_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    """As `submit` and `run` take them."""
    document = json.loads(run(capsys, "--nodes", "2-4", "--gpus-per-node", "a100:2", "--json"))
    assert [document["nodes"], *(smaller["nodes"] for smaller in document["smaller"])] == [4, 3, 2]
    assert document["ranks"] == 8
    assert run(capsys, "--nodes", "2-4", "--min-nodes", "2") == run(capsys, "--nodes", "4", "--min-nodes", "2")
    assert "No mesh fits on fewer than 2 nodes" in run(capsys, "--nodes", "1-2", "--pp", "2")


def test_the_learning_rate_is_scaled_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "4", "--global-batch", "64", "--micro-batch", "8"]
    assert "learning rate" not in run(capsys, *words)
    assert "learning rate x 0.5" in run(capsys, *words, "--keep-accumulation", "linear")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--nodes", "1", "--gpus-per-node", "2", "--tp", "4"], 78, "tp 2 instead of 4"),
        (["--nodes", "2", "--gpus-per-node", "8,8,8"], 78, "describes 3 nodes"),
        (["--nodes", "2", "--global-batch", "4", "--keep-accumulation", "lin"], 64, "did you mean 'linear'"),
        (["--nodes", "2", "--tpp", "4"], 64, "did you mean '--tp'"),
        (["--nodes", "0"], 64, "not at least 1"),
        (["--nodes", "3", "--gpus-per-node", "8(x-1)"], 78, 'write 8 or a100:8, or "8(x5),7"'),
        (["--nodes", "3", "--gpus-per-node", ""], 78, "cannot be read"),
        (["--nodes", "3", "--gpus-per-node", "8(x99999999999)"], 78, "more nodes than any cluster has"),
        (["--nodes", "100000000"], 78, "more than any cluster has"),
        (["--nodes", "2", "--gpus-per-node", "1000000"], 78, "no cluster has"),
        (["--nodes", "2", "--tp", "9" * 30], 78, "no cluster has"),
        (["--nodes", "2", "--tp", "/" + "9" * 30], 78, "no cluster has"),
        (["--nodes", "2", "--gpus-per-node", "8", "--dp-shard", "1000000"], 78, "dp_shard 16 instead of 1000000"),
        (["--nodes", "2", "--min-nodes", "3"], 78, "larger than the whole one of 2"),
        (["--nodes", "2", "--tp", "x"], 78, "cannot read 'x'"),
        (["--nodes", "4-2"], 64, "did you mean 2-4?"),
        (["--nodes", "2-"], 64, "no whole number"),
        (["--nodes", "2-4-6"], 64, "no whole number"),
        (["--nodes", "1_0"], 64, "no whole number"),
        (["--nodes", "9" * 5000], 64, "no whole number"),
        (["--nodes", "2-4", "--min-nodes", "3"], 78, "say the smallest allocation once"),
        (["--nodes", "2", "--tp", "9" * 5000], 78, "cannot read"),
        (["--nodes", "2", "--gpus-per-node", "9" * 5000], 78, "cannot be read"),
        (["--nodes", "2", "--gpus-per-node", "8(x" + "9" * 5000 + ")"], 78, "cannot be read"),
        (["--nodes", "2", "--gpus-per-node", "gpu:" + "9" * 5000], 78, "cannot be read"),
        (["--nodes", "2", "--tp", "4,2"], 78, "only one of them could count"),
        (["--nodes", "2", "--gpus-per-node", "8", "--gpus-per-task", "16"], 78, "A task needs 16 GPUs"),
        (["--nodes", "2", "--micro-batch", "4"], 78, "--micro-batch without --global-batch would do nothing"),
        (["--nodes", "2", "--deal", "whole"], 78, "--deal without --global-batch would do nothing"),
        (["--nodes", "2", "--keep-accumulation", "sqrt"], 78, "without --global-batch would do nothing"),
        (["--nodes", "2", "--global-batch", "4", "--micro-batch", "5"], 78, "more than the whole --global-batch 4"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        got = main(["plan", "mesh", *words])
    except SystemExit as end:
        got = int(end.code or 0)
    assert got == code
    assert said in capsys.readouterr().err


def test_a_million_nodes_are_not_listed_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mesh", "--nodes", "1000000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 1100
    assert lines[-1] == "999,000 smaller allocations are not shown: --nodes 999000 goes on, --json has all of them."
