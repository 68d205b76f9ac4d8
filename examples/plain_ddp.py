"""A training script as they are found everywhere: started by torchrun, with one snapshot file of its own, and no word about us.

    torchrun --nproc-per-node 2 examples/plain_ddp.py --epochs 5 --snapshot snapshot.pt
    slurm-resilience run --local 1 --ranks-per-node 2 --checkpoint-file snapshot.pt -- \
        python examples/plain_ddp.py --epochs 5 --snapshot {checkpoint}

It saves once an epoch, straight over the old file, and goes on from the file when there is one.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--snapshot", default="snapshot.pt")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between batches, to have time to hurt it")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    inputs = torch.randn(256, 20)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = torch.nn.Linear(20, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    first_epoch = 0
    if os.path.exists(args.snapshot):
        snapshot = torch.load(args.snapshot, map_location=device)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first_epoch = snapshot["epoch"]
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} begins with epoch {first_epoch}", flush=True)

    wrapped = DistributedDataParallel(model)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for batch, target in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(wrapped(batch.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
            time.sleep(args.pause)
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, args.snapshot)
            print(f"epoch {epoch} loss {total / len(loader):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
