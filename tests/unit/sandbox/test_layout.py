"""Names and paths that cannot clash."""

from __future__ import annotations

import pytest

from slurm_resilience.errors import ConfigError
from slurm_resilience.sandbox.layout import MAX_NODES, Layout, address, hosts_text, node_names


@pytest.mark.parametrize("name", ["", "A", "1a", "a/b", "..", "a b", "a_b", "-a", "a" * 25, "a\n"])
def test_a_name_that_would_break_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        Layout(name)


def test_sockets_fit_into_their_108_bytes() -> None:
    layout = Layout("a" * 24)
    assert len(str(layout.munge_socket)) < 108
    assert len(str(layout.database / "socket")) < 108


def test_every_host_has_an_address_and_the_hosts_file_knows_it() -> None:
    nodes = node_names(MAX_NODES)
    assert len({address(host) for host in ("ctl", "login", *nodes)}) == MAX_NODES + 2
    lines = [line.split() for line in hosts_text(nodes).splitlines()]
    assert [address("n3"), "n3"] in lines
    assert [address("login"), "login"] in lines


@pytest.mark.parametrize("count", [0, -1, MAX_NODES + 1])
def test_a_number_of_nodes_that_cannot_be(count: int) -> None:
    with pytest.raises(ConfigError, match=r"1 to \d+ nodes"):
        node_names(count)
