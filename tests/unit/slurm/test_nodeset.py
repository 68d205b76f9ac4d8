"""Node lists as Slurm writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import SlurmError
from slurm_resilience.slurm.nodeset import expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3],gpu07", ("n1", "n2", "n3", "gpu07")),
        ("b[1-2],a1", ("b1", "b2", "a1")),  # Slurm's order, not the alphabet's: SLURM_TASKS_PER_NODE follows it
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("r[1-2]c[1,3]", ("r1c1", "r1c3", "r2c1", "r2c3")),
        ("n1,n1", ("n1",)),
        ("login", ("login",)),
        ("", ()),
        ("(null)", ()),
        ("None", ()),
        ("None assigned", ()),
    ],
)
def test_expands_what_slurm_writes(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[1", "n1]", "n[1-", "@all", "n1 n2", "n*", "n[3-1]", "n[1-99999999999]", "r[1-2000]c[1-2000]"]
)
def test_refuses_what_is_no_node_list(text: str) -> None:
    with pytest.raises(SlurmError, match="is not a node list"):
        expand(text)


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{1,4}", fullmatch=True), unique=True))
def test_folding_loses_nothing(names: list[str]) -> None:
    assert set(expand(fold(names))) == set(names)


def test_fold_is_short() -> None:
    assert fold(["n3", "n1", "n2", "n2"]) == "n[1-3]"
    assert fold([]) == ""
