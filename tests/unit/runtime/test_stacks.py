"""What a rank is doing, and which of several is the one that the others wait for: from dumps as faulthandler writes them."""

from __future__ import annotations

from typing import Any

from slurm_resilience.runtime.stacks import culprit, doing, summary, threads

SITE = "/venv/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"


def dump(*frames: tuple[str, int, str], others: bool = True) -> str:
    """The main thread stands last, as it does in real ones."""
    head = "Thread 0x00007f11aa2 [pt_gloo_runloop] (most recent call first):\n  <no Python frame>\n\n" if others else ""
    lines = "\n".join(f'  File "{file}", line {line} in {function}' for file, line, function in frames)
    return f"{head}Current thread 0x00007f11bb1 [python] (most recent call first):\n{lines}\n"


COLLECTIVE = dump(
    (f"{TORCH}/distributed/distributed_c10d.py", 2843, "all_reduce"),
    (f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper"),
    ("/home/alice/train.py", 40, "main"),
    ("/home/alice/train.py", 60, "<module>"),
)
BARRIER = dump(
    (f"{TORCH}/distributed/distributed_c10d.py", 4818, "barrier"),
    (f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper"),
    ("/home/alice/train.py", 44, "main"),
)
LOOP = dump(("/home/alice/train.py", 33, "augment"), ("/home/alice/train.py", 60, "<module>"))
BACKWARD = dump((f"{TORCH}/autograd/graph.py", 841, "_engine_run_backward"), ("/home/alice/train.py", 38, "main"))
LOADER = dump(
    ("/usr/lib/python3.11/multiprocessing/connection.py", 931, "wait"),
    (f"{TORCH}/utils/data/dataloader.py", 1284, "_try_get_data"),
    ("/home/alice/train.py", 30, "main"),
)
AGREEMENT = dump((f"{SITE}/slurm_resilience/training/agreement.py", 101, "drain"), ("/home/alice/train.py", 29, "main"))


def look(stacks: str = "", **more: Any) -> dict[str, Any]:
    return {"state": "S", "cpu": 0.0, "stacks": stacks, "asked": True, **more}


def test_the_main_thread_is_the_last() -> None:
    found = threads(COLLECTIVE)
    assert len(found) == 2
    assert str(found[-1][0]) == "distributed_c10d.py:2843 in all_reduce"
    assert threads("") == threads("something else\n") == []


def test_each_place_is_named_for_what_it_is() -> None:
    assert doing(look(COLLECTIVE)).what == "waits for the others in all_reduce, called at train.py:40 in main"
    assert doing(look(AGREEMENT)).kind == "collective"
    assert doing(look(LOOP, cpu=0.97)).what == "runs at train.py:33 in augment (97% of a processor)"
    assert doing(look(LOOP, state="R", cpu=0.1)).what.startswith("runs at")
    assert doing(look(LOOP)).what == "stands still at train.py:33 in augment (0% of a processor)"
    assert doing(look(BACKWARD)).what.startswith("is in the backward pass at train.py:38")
    assert "waits for its data loader (_try_get_data), called at train.py:30" in doing(look(LOADER)).what


def test_what_the_kernel_shows_goes_before_what_python_says() -> None:
    assert doing(look(LOOP, tracer=77)).what == "sits in a debugger (process 77) at train.py:33 in augment"
    assert "is stopped by a signal (state T)" in doing(look("", state="T")).what
    assert (
        "in nfs_wait_bit_killable for a device or a file system"
        in doing(look("", state="D", wchan="nfs_wait_bit_killable")).what
    )
    assert "900 MB of it are swapped out" in doing(look(LOOP, swap_kb=900 * 1024)).what
    silent = doing(look("", cpu=0.99))
    assert silent.what == "uses 99% of a processor; it did not answer with its Python stack"
    assert doing(look("", asked=False, wchan="futex_wait_queue")).what.startswith("does nothing, waits in futex_wait_queue")


def test_who_waits_in_a_collective_is_no_culprit() -> None:
    found = culprit({0: look(COLLECTIVE), 1: look(LOOP, cpu=1.0), 2: look(COLLECTIVE)}, named=0)
    assert found is not None
    assert found[0] == 1
    assert "2 others: waits for the others in all_reduce" in found[1]


def test_a_rank_that_cannot_run_is_the_first_suspect() -> None:
    found = culprit({0: look(LOOP), 1: look(COLLECTIVE), 2: look("", state="T")}, named=0)
    assert found is not None
    assert found[0] == 2


def test_in_a_deadlock_the_odd_one_out_is_named() -> None:
    found = culprit({0: look(COLLECTIVE), 1: look(COLLECTIVE), 2: look(BARRIER), 3: look(COLLECTIVE)}, named=0)
    assert found is not None
    assert found[0] == 2
    assert "they will never meet" in found[1]
    assert "barrier" in found[1]
    assert "all_reduce" in found[1]


def test_where_all_do_the_same_the_limits_have_named_one() -> None:
    assert (culprit({0: look(COLLECTIVE), 1: look(COLLECTIVE)}, named=1) or (None,))[0] == 1
    assert (culprit({0: look(LOOP), 1: look(LOOP)}, named=1) or (None,))[0] == 1
    assert culprit({}, named=1) is None


def test_the_summary_says_the_same_thing_once_rarest_first() -> None:
    looks = {rank: look(COLLECTIVE) for rank in range(64)}
    looks[17] = look(LOOP, cpu=0.5)
    looks[18] = look(LOOP, cpu=0.6)
    (few, what), (many, _) = summary(looks)
    assert few == [17, 18]
    assert "train.py:33" in what
    assert len(many) == 62
