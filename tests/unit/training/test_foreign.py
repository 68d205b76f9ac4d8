"""Weights from others and for others: .pt and safetensors, on one rank and on sharded models."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_resilience import Run
from slurm_resilience.checkpoint.entry import Entry
from slurm_resilience.checkpoint.manifest import Manifest
from slurm_resilience.checkpoint.store import CheckpointStore
from slurm_resilience.cli import main
from slurm_resilience.errors import ConfigError, ExitCode
from slurm_resilience.training.foreign import read_weights, write_weights
from slurm_resilience.training.starting import place_weights

from . import programs
from .worlds import RankError, run_world


class Tied(torch.nn.Module):
    """Embedding and output share a weight; there is a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.out = torch.nn.Linear(3, 7, bias=False)
        self.out.weight = self.embed.weight


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_what_was_written_is_read_whatever_wrapped_it(tmp_path: Path, ending: str, prefix: str) -> None:
    there, here = tied(1), tied(2)
    state = {f"{prefix}{name}": value for name, value in there.state_dict().items()}
    if ending == ".safetensors":
        del state[f"{prefix}out.weight"]  # that format refuses two names for one memory
    file = tmp_path / f"weights{ending}"
    assert write_weights(file, state, {}) == file.stat().st_size
    (tmp_path / "beside").touch()
    assert file.stat().st_mode == (tmp_path / "beside").stat().st_mode, "who may read other files may read these"
    (tmp_path / "beside").unlink()
    place_weights("model", here, read_weights(file), True, file)
    assert same(here, there)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    state = tied(1).state_dict()
    del state["out.weight"]
    names = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(state)}
    for part in set(names.values()):
        write_weights(tmp_path / part, {name: state[name] for name in state if names[name] == part}, {})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert read_weights(tmp_path).keys() == state.keys()
    index.write_text(json.dumps({"weight_map": {"a": "../part-0.safetensors"}}))
    with pytest.raises(ConfigError, match="outside of its folder"):
        read_weights(tmp_path)


def test_the_model_in_a_file_that_holds_more(tmp_path: Path) -> None:
    state, file = tied(1).state_dict(), tmp_path / "all.pt"
    torch.save({"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}}, file)
    assert read_weights(file).keys() == state.keys()
    torch.save({"epoch": 3, "nets": {"teacher": state}}, file)
    assert read_weights(file, "nets.teacher").keys() == state.keys()
    for key in (None, "nets", "nets.pupil"):
        with pytest.raises(ConfigError, match=r"holds|there is"):
            read_weights(file, key)
    torch.save({"epoch": 3, "state_dict": {f"net.{name}": value for name, value in state.items()}}, file)
    assert read_weights(file, "state_dict.net").keys() == state.keys(), "Lightning's, of a module that has the model in net"
    with pytest.raises(ConfigError, match=r"'state_dict\.ne'"):
        read_weights(file, "state_dict.ne")
    torch.save({"state_dict": {**state, "norm._extra_state": 5}}, file)
    with pytest.raises(ConfigError, match=r"'norm\._extra_state' is a int"):
        read_weights(file, "state_dict")
    safe = tmp_path / "all.safetensors"
    del state["out.weight"]
    write_weights(safe, {**{f"nets.teacher.{name}": value for name, value in state.items()}, "step": torch.ones(1)}, {})
    assert read_weights(safe, "nets.teacher").keys() == state.keys()
    with pytest.raises(ConfigError, match=r"'nets\.pupil'"):
        read_weights(safe, "nets.pupil")
    with pytest.raises(ConfigError, match=r"no place for numbers of torch\.complex128"):
        write_weights(safe, {"a": torch.zeros(1, dtype=torch.complex128)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.pt", "all.safetensors"]


class Held(torch.nn.Module):
    """A model whose own names begin as those of DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_a_models_own_module_is_no_wrapper(prefix: str) -> None:
    here, there = Held(), Held()
    given = {f"{prefix}{name}": value for name, value in there.state_dict().items()}
    assert place_weights("model", here, given, True, Path("x.pt"))[0] == 2
    assert same(here, there)


def test_a_file_that_is_named_too_late_is_refused(tmp_path: Path) -> None:
    with Run(folder=tmp_path / "run") as run:
        run.register(model=tied(1))
        run.resume()
        with pytest.raises(ConfigError, match=r"after run\.resume"):
            run.start_from(tmp_path / "x.pt")


class Hostile:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("owned",)


@pytest.mark.parametrize("bad", ["missing", "text", "empty", "cut", "hostile", "folder", "ending", "pipe", "loop"])
def test_what_is_no_file_of_weights_is_refused_and_runs_nothing(
    tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ("x.txt" if bad == "ending" else "x.pt")
    whole = tmp_path / "whole.pt"
    torch.save(tied(1).state_dict(), whole)
    if bad == "folder":
        file.mkdir()
    elif bad == "pipe":
        os.mkfifo(file)
    elif bad == "loop":
        file.symlink_to(file)
    elif bad == "hostile":
        torch.save({"model": Hostile()}, file)
    elif bad != "missing":
        file.write_bytes({"empty": b"", "cut": whole.read_bytes()[:-300]}.get(bad, b"hello"))
    with pytest.raises(ConfigError):
        read_weights(file)
    for suffix in (".safetensors",):
        other = tmp_path / f"y{suffix}"
        other.write_bytes(b"hello")
        with pytest.raises(ConfigError, match="no whole safetensors"):
            read_weights(other)
    assert "owned" not in capsys.readouterr().out


def test_names_and_shapes_that_do_not_match_change_nothing(tmp_path: Path) -> None:
    here = tied(2)
    before = {name: value.clone() for name, value in here.state_dict().items()}
    state = tied(1).state_dict()
    path = Path("x.pt")
    missing = {name: value for name, value in state.items() if name != "norm.weight"}
    for given, why in (
        (missing, "not in the file: norm.weight"),
        ({**state, "head.bias": torch.zeros(1)}, r"not in the model: head\.bias"),
        ({**state, "norm.bias": torch.zeros(9)}, r"norm\.bias: \[9\] in the file, \[3\] in the model"),
        ({**state, "norm.bias": torch.zeros(3, dtype=torch.int8)}, r"norm\.bias: torch\.int8 in the file"),
        ({**state, "norm.bias": torch.zeros(3, dtype=torch.cfloat)}, r"norm\.bias: torch\.complex64 in the file"),
        ({"other": torch.zeros(1)}, "not in the model: other"),
        ({**state, "norm.bias": torch.zeros(3, device="meta")}, r"norm\.bias: on the meta device"),
        ({**state, "norm.bias": torch.zeros(3).to_sparse()}, r"norm\.bias: torch\.sparse_coo"),
        ({**state, "norm.bias": torch.tensor([0.0, torch.nan, 0.0])}, r"norm\.bias: holds NaN"),
        ({**state, "norm.bias": torch.tensor([0.0, -torch.inf, 0.0])}, r"norm\.bias: holds an infinity"),
        ({**state, "norm.bias": torch.full((3,), 1e300, dtype=torch.double)}, r"holds 1e\+300, too large for torch\.float32"),
    ):
        with pytest.raises(ConfigError, match=why):
            place_weights("model", here, given, True, path)
        assert all(torch.equal(before[name], value) for name, value in here.state_dict().items())
    mask = {**state, "norm.running_mean": torch.full((3,), -torch.inf)}  # a buffer may hold what a parameter must not
    assert place_weights("model", tied(2), mask, True, path) == (len(state), 0, 0)
    assert place_weights("model", here, missing, False, path) == (len(missing), 1, 0)
    assert torch.equal(here.embed.weight, state["embed.weight"])
    with torch.device("meta"), pytest.raises(ConfigError, match="no memory yet"):
        place_weights("model", Tied(), state, True, path)


def begin(kind: str, file: str) -> dict[str, Any]:
    """Where a run begins, and the loss there, which tells whose weights it has."""
    model = programs.wrap(programs.make_model().requires_grad_(True), kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    run = Run()
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    run.start_from(file)
    began = run.resume()
    x, y = programs.sample(range(4))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    for _ in run.steps(began + 1):
        pass
    run.close()
    return {"began": began, "loss": float(loss.detach())}


def begin_in_a_group(kind: str, file: str) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    return begin(kind, file)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_copied_and_sharded_models_begin_with_the_file_and_then_with_their_own(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "base.safetensors"
    model = programs.make_model()
    write_weights(file, model.state_dict(), {})
    x, y = programs.sample(range(4))
    expected = float(torch.nn.functional.cross_entropy(model(x), y).detach())
    first = run_world(2, begin_in_a_group, kind, str(file), run_dir=tmp_path / "run")
    assert [one["began"] for one in first] == [0, 0]
    assert [one["loss"] for one in first] == pytest.approx([expected] * 2, rel=1e-6)
    file.unlink()  # a run with a checkpoint of its own does not ask for the file again
    again = run_world(2, begin_in_a_group, kind, str(file), run_dir=tmp_path / "run", attempt=2)
    assert [one["began"] for one in again] == [1, 1]
    assert [one["loss"] for one in again] == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, ending: str) -> None:
    keep = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails then, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, keep[1]))
    try:
        with pytest.raises(ConfigError, match=r"(?s)could not be written in .*has room"):
            write_weights(tmp_path / f"x{ending}", {"a": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, keep)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def begin_unlike(file: str) -> None:
    torch.distributed.init_process_group("gloo")
    run = Run()
    run.register(model=tied(1))
    if run.rank == 0:
        run.start_from(file)
    run.resume()


def test_ranks_that_begin_with_different_weights_are_told(tmp_path: Path) -> None:
    file = tmp_path / "base.pt"
    torch.save(tied(2).state_dict(), file)
    with pytest.raises(RankError, match=r"(?s)different weights.*rank 0: /.*base\.pt.*rank 1: no start_from"):
        run_world(2, begin_unlike, str(file), run_dir=tmp_path / "run")


def saved_once(folder: Path) -> Tied:
    """A model of which a run has one checkpoint."""
    model = tied(3)
    with Run(folder=folder) as run:
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        run.resume()
        list(run.steps(1))
    return model


def test_a_checkpoint_is_exported_and_begun_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved_once(tmp_path / "run")
    for name in ("w.pt", "w.safetensors"):
        out = tmp_path / name
        words = ["checkpoints", "export", str(tmp_path / "run"), "-o", str(out), "--json"]
        assert main(words) == ExitCode.OK
        told = json.loads(capsys.readouterr().out)
        assert (told["step"], told["model"], told["tensors"]) == (1, "model", len(model.state_dict()))
        assert main(words) == ExitCode.CONFIG_ERROR  # there already
        link = tmp_path / f"link-to-nothing{out.suffix}"
        link.symlink_to(tmp_path / "nothing")
        assert main([*words[:-2], str(link)]) == ExitCode.CONFIG_ERROR
        assert link.is_symlink()
        assert main([*words, "--force"]) == ExitCode.OK
        capsys.readouterr()
        other = tied(4)
        place_weights("model", other, read_weights(out), True, out)
        assert same(other, model)
    assert main(["checkpoints", "export", str(tmp_path / "run"), "-o", str(tmp_path / "w.npz")]) == ExitCode.CONFIG_ERROR
    assert "which format" in capsys.readouterr().err


def test_a_bad_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved_once(tmp_path / "run")
    (shard,) = (tmp_path / "run").glob("checkpoints/step-*/__0_0.distcp")
    raw = bytearray(shard.read_bytes())
    at = raw.find(bytes(model.embed.weight.detach().numpy().tobytes()[:16]))
    raw[at] ^= 1
    shard.write_bytes(raw)
    out = tmp_path / "w.pt"
    assert main(["checkpoints", "export", str(tmp_path / "run"), "-o", str(out)]) == ExitCode.BAD_CHECKPOINT
    assert not out.exists()
    assert "embed.weight" in capsys.readouterr().err


def test_what_is_exported_is_not_pruned_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (1, 2, 3):  # the last two are kept anyhow: the newest, and the newest that was loaded once
        with Run(folder=tmp_path / "run") as run:
            run.register(model=tied(3))
            run.resume()
            list(run.steps(steps))
    root, whole = tmp_path / "run" / "checkpoints", CheckpointStore.manifest

    def pruned_under_our_hands(store: CheckpointStore, entry: Entry) -> Manifest:
        monkeypatch.undo()
        assert main(["checkpoints", "prune", str(root), "--keep-last", "1", "--no-verify"]) == ExitCode.OK
        return whole(store, entry)

    monkeypatch.setattr(CheckpointStore, "manifest", pruned_under_our_hands)
    assert main(["checkpoints", "export", str(root), "1", "-o", str(tmp_path / "w.pt")]) == ExitCode.OK
    assert main(["checkpoints", "prune", str(root), "--keep-last", "1", "--no-verify"]) == ExitCode.OK
    assert len(list(root.glob("step-*"))) == 2, "it was kept for as long as it was read"
