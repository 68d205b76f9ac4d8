"""Where does a job hold how many GPUs?  Lines as scontrol 22.05.8 prints them."""

from __future__ import annotations

import pytest

from slurm_resilience.slurm.gpus import gpu_request, gpus_on_nodes

HEAD = "JobId=1 JobName=t UserId=alice(1000) JOB_GRES=gpu:6 "
TAIL = " MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null)"


@pytest.mark.parametrize(
    ("groups", "gpus"),
    [
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:4(IDX:0-3)   Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)", {"n1": 4, "n2": 2}),
        ("Nodes=n[1-2],x7 CPU_IDs=0-3,9 Mem=0 GRES=gpu:a100:2(IDX:0,3)", {"n1": 2, "n2": 2, "x7": 2}),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:a:2(IDX:0-1),gpu:b:1(IDX:2),shard:0", {"n1": 3}),
        ("Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0) Nodes=n2 CPU_IDs=0 Mem=0 GRES=", {"n1": 1, "n2": 0}),
        ("Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=", {}),
        ("Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=nic:2(IDX:0-1)", {}),
        ("Nodes=n[1- CPU_IDs=0 Mem=0 GRES=gpu:2", {}),
        ("NodeList=n1", {}),
    ],
)
def test_every_group_of_nodes_is_read(groups: str, gpus: dict[str, int]) -> None:
    assert gpus_on_nodes(HEAD + groups + TAIL) == gpus


def test_only_what_repeats_the_request_is_one() -> None:
    asked = {"SLURM_GPUS": "6", "SLURM_GPUS_PER_TASK": "2", "SLURM_TRES_PER_TASK": "gres/gpu=2", "SLURM_NTASKS_PER_GPU": "1"}
    more = {"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_PER_SOCKET": "", "CUDA_VISIBLE_DEVICES": "0"}
    assert gpu_request({**asked, **more}) == asked
