"""The text of a batch script: sbatch's lines, a block of settings, and the body of the shipped template, word for word.

There is one body, in ``sbatch/resilient.sbatch``; what ``submit_resilient`` and ``slurm-resilience submit`` queue is the
same shell that a user copies.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_resilience.errors import ConfigError
from slurm_resilience.submit.templates import template_path

_BODY = "# ---- body "
_LAST_LINE = 'exit "$code"'


class Shell(str):
    """A word that stands in the script as it is, for the shell to read."""

    __slots__ = ()


@dataclass(frozen=True)
class Settings:
    """What the body of the script needs to know.

    ``resilience``: how slurm-resilience is called there; ``options``: those of its ``run``; ``command``: what is started on
    every rank; ``lead_s``: how early Slurm warns.  ``setup`` and ``teardown`` are shell lines of the user's around it all.
    """

    run_dir: str
    resilience: Sequence[str]
    options: Sequence[str]
    command: Sequence[str]
    lead_s: int
    setup: Sequence[str] = ()
    teardown: Sequence[str] = ()


def body() -> str:
    """The body of the template, without its headline.  Raises :class:`ConfigError` when somebody has edited the marks away."""
    path = template_path()
    text = path.read_text(encoding="utf-8")
    _, mark, rest = text.partition(f"\n{_BODY}")
    _, newline, lines = rest.partition("\n")
    if not mark or not newline or lines.rstrip().rpartition("\n")[2] != _LAST_LINE:
        raise ConfigError(
            f"{path} is not the template that we shipped",
            evidence=f"it has no line that begins with {_BODY.strip()!r}, or does not end with {_LAST_LINE!r}",
            remedy="install slurm-resilience again, and edit a copy of the template",
        )
    return lines


def render(header: str, settings: Settings) -> str:
    """A whole script: ``header`` (the shebang and sbatch's lines), ``settings``, the template's body."""
    text = body()
    if settings.teardown:
        text = text.rstrip()[: -len(_LAST_LINE)] + "\n".join(["set +e", *settings.teardown, _LAST_LINE]) + "\n"
    return fill("submission", {**vars(settings), "header": header.rstrip("\n"), "body": text})


def fill(name: str, values: Mapping[str, Any]) -> str:
    """One of the shipped Jinja templates with these values; ``word(x)`` and ``words(list)`` quote for the shell in it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: it costs a tenth of a second

    folder = template_path(f"templates/{name}.j2").parent
    environment = Environment(  # noqa: S701  what comes out is shell, not HTML, and word() quotes it
        loader=FileSystemLoader(folder), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template(f"{name}.j2").render({**values, "word": _word, "words": _words})


def _words(words: Sequence[str]) -> str:
    return " ".join(map(_word, words))


def _word(word: str) -> str:
    return str(word) if isinstance(word, Shell) else shlex.quote(word)
