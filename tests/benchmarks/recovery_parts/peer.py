"""The small training as people write it for torchrun: resumes from the newest checkpoint, believes it.

``--fsdp``: FSDP2 and DCP, else bare torch and ``torch.save``.  ``--heartbeat``: tell ft_launcher's monitor of each step.
``--timeout S``: of the process group, which is all that sees a hang under torchrun.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import small


def save(folder: Path, step: int, model: Any, optimizer: Any) -> None:
    import torch
    import torch.distributed as dist

    path = folder / f"checkpoint-{step}"
    if "--fsdp" in sys.argv:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    elif dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(str(step))
        (folder / "latest.new").rename(folder / "latest")


def load(folder: Path, model: Any, optimizer: Any) -> int:
    import torch

    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    path = folder / f"checkpoint-{step}"
    if "--fsdp" in sys.argv:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return step


def main() -> None:
    marks = small.Marks()
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if "--fsdp" in sys.argv:
        import torch.distributed.checkpoint
        from torch.distributed.fsdp import fully_shard
    monitor = None
    if "--heartbeat" in sys.argv:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        monitor = RankMonitorClient()
    marks.put("imported")
    if monitor is not None:
        monitor.init_workload_monitoring()
    patience = timedelta(seconds=float(sys.argv[sys.argv.index("--timeout") + 1])) if "--timeout" in sys.argv else None
    dist.init_process_group("gloo", timeout=patience)
    marks.put("joined")
    model, data, target = small.build()
    if "--fsdp" in sys.argv:
        for layer in model[::2]:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    marks.put("built")
    begun = load(marks.folder, model, optimizer)
    marks.put("loaded")
    share = small.GLOBAL_BATCH // dist.get_world_size()
    for step in range(begun, small.STEPS):
        order = torch.randperm(small.SAMPLES, generator=torch.Generator().manual_seed(step))[: small.GLOBAL_BATCH]
        some = order[dist.get_rank() * share :][:share]
        loss = torch.nn.functional.mse_loss(model(data[some]), target[some])
        loss.backward()
        if "--fsdp" not in sys.argv:
            small.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if monitor is not None:
            monitor.send_heartbeat()
            if step == begun + 30:  # the first few are slow; its own guide says to ask after some iterations
                monitor.calculate_and_set_hb_timeouts()
        if (step + 1) % small.SAVE_EVERY == 0:
            save(marks.folder, step + 1, model, optimizer)
        marks.pace(step)


if __name__ == "__main__":
    main()
